"""Evaluations with perturbations: the same episodes, played again and compared with themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armature.components.contracts.stages import Artifact
from armature.components.environments.libero.perturbations.settings import PerturbationSettings
from armature.components.evaluation.libero.results import by_perturbation, read_perturbed, read_results
from armature.components.evaluation.libero.schedule import noise_seed, plan_episodes
from armature.components.evaluation.libero.settings import (
    CompareLiberoSettings,
    EvaluateLiberoStageSettings,
)
from armature.components.evaluation.libero.stage import compare_libero, evaluate_policy
from tests.environments.libero.simulated import simulator
from tests.evaluation.libero.playground import TASKS, Homing, Plane, settings
from tests.evaluation.libero.test_stage import SIMULATOR, Events, context, evaluate
from tests.refusals import refused

PERTURBATIONS = PerturbationSettings(camera=(0.5, 1.0), language=(0.0,))
LABELS = ["camera/0.5", "camera/1", "language/0"]


def test_every_episode_is_planned_again_with_each_perturbation() -> None:
    chosen = settings(perturbations=PERTURBATIONS)
    planned = plan_episodes(chosen, {"libero_spatial": TASKS})
    plain = plan_episodes(settings(), {"libero_spatial": TASKS})
    assert planned[:21] == plain and len(planned) == 4 * 21 == len({each.key for each in planned})
    for place, each in enumerate(planned[21:]):
        alike = plain[place % 21]
        assert each.key == (*alike.key, LABELS[place // 21]) and each.perturbation is not None
        assert (each.initial_state, each.simulator_seed) == (alike.initial_state, alike.simulator_seed)
        assert noise_seed(chosen, each, 3) == noise_seed(chosen, alike, 3)


def test_success_by_perturbation_beside_the_same_episodes_without(tmp_path: Path) -> None:
    """Wilson's limits by hand: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    chosen = settings(perturbations=PERTURBATIONS)
    out, events, report = evaluate(tmp_path, Homing(), Plane(), perturbations=chosen.perturbations, batch=3)
    plain, perturbed = read_results(out), read_perturbed(out)
    groups = by_perturbation(perturbed)
    assert list(groups) == LABELS and report.rows["perturbed episodes"] == 63
    assert [each.actions for each in groups["language/0"]] == [each.actions for each in plain]
    far = groups["camera/1"]
    assert [each.actions for each in far] != [each.actions for each in plain]

    numbers = json.loads((out / "metrics.json").read_text())["perturbations"]
    z, n, solved = 1.959963984540054, 21, sum(each.success for each in far)
    p = solved / n
    half = z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    assert numbers["camera/1"]["success"] == p
    assert numbers["camera/1"]["success_low"] == pytest.approx((p + z * z / (2 * n) - half) / (1 + z * z / n))
    only_without = sum(a.success and not b.success for a, b in zip(plain, far, strict=True))
    only_with = sum(b.success and not a.success for a, b in zip(plain, far, strict=True))
    assert numbers["camera/1"]["solved_only_without"] == only_without > 0
    assert numbers["camera/1"]["difference"] == pytest.approx((only_with - only_without) / n)
    assert numbers["language/0"]["difference"] == 0.0 and numbers["language/0"]["p_value"] == 1.0
    assert events.numbers["perturbed/camera/1/success"] == p

    page = (out / "report.html").read_text()
    assert "With perturbations" in page and ">camera/0.5<" in page
    videos = sorted(str(path.relative_to(out / "videos/libero_spatial_0")) for path in out.rglob("camera/1/*.mp4"))
    assert len(videos) >= 1 and f'href="videos/libero_spatial_0/{videos[0]}"' in page
    info = json.loads((out / "eval_info.json").read_text())
    assert info["overall"]["n_episodes"] == 21 and not any("camera" in path for path in info["overall"]["video_paths"])


def test_without_perturbations_nothing_is_added(tmp_path: Path) -> None:
    with_them, _, _ = evaluate(tmp_path / "with", Homing(), Plane(), perturbations=PERTURBATIONS)
    without, _, report = evaluate(tmp_path / "without", Homing(), Plane())
    assert (with_them / "results.parquet").read_bytes() == (without / "results.parquet").read_bytes()
    assert not (without / "perturbed.parquet").exists() and "perturbed episodes" not in report.rows
    assert "perturbations" not in json.loads((without / "metrics.json").read_text())
    page = (without / "report.html").read_text()
    assert "With perturbations" not in page and "By perturbation" not in page


def test_processes_batches_and_deaths_change_no_byte(tmp_path: Path) -> None:
    files = []
    for name, batch, planes in (("one", 1, [Plane()]), ("two", 5, [Plane(deaths=(9,)), Plane()])):
        folder = tmp_path / name
        (folder / "out").mkdir(parents=True)
        chosen = EvaluateLiberoStageSettings(
            simulator=SIMULATOR, evaluation=settings(batch=batch, perturbations=PERTURBATIONS, videos_per_task=0)
        )
        evaluate_policy(Homing(), {"libero_spatial": TASKS}, planes, chosen, folder / "out", context(folder, Events()))
        files.append((folder / "out/perturbed.parquet").read_bytes())
    assert files[0] == files[1]


def test_two_policies_are_compared_with_the_perturbations_that_both_had(tmp_path: Path) -> None:
    paths = {}
    for name, noise, perturbations in (
        ("first", 1.4, PerturbationSettings(camera=(0.5,), light=(1.0,))),
        ("second", 0.5, PERTURBATIONS),
    ):
        out, _, _ = evaluate(tmp_path / name, Homing(noise), Plane(), videos_per_task=0, perturbations=perturbations)
        paths[name] = Artifact(kind="evaluate-libero", path=out, digest=name * 3)
    (tmp_path / "compared").mkdir()
    compare_libero(CompareLiberoSettings(), paths, tmp_path / "compared", context(tmp_path, Events()))
    compared = json.loads((tmp_path / "compared/comparison.json").read_text())
    assert [name for name in compared if "camera" in name or "light" in name] == ["camera/0.5"]
    first, second = (by_perturbation(read_perturbed(paths[name].path))["camera/0.5"] for name in ("first", "second"))
    pairs = list(zip(first, second, strict=True))
    assert compared["camera/0.5"]["only_second"] == sum(b.success and not a.success for a, b in pairs) > 0


def test_settings_are_checked() -> None:
    with refused("value_error", "robot"):
        PerturbationSettings(robot=(0.5, 0.5))
    layout = settings(perturbations=PerturbationSettings(layout=(0.5,)))
    with refused("value_error", "simulator.num_steps_wait is 2"):
        EvaluateLiberoStageSettings(simulator=simulator(), evaluation=layout)
