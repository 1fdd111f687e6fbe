"""The stage evaluate-libero: its files, videos and perturbations; and the stage compare-libero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from pydantic import ValidationError

from armature.components.configuration.stages import TerminalEvents, ThreadUnits
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import Artifact, StageContext, StageReport
from armature.components.robots.evaluation.episode import EpisodeOutcome, EvaluationJournal, PlayedEpisode
from armature.components.robots.evaluation.results import by_perturbation, read_perturbed, read_results
from armature.components.robots.evaluation.robot import libero_robot, refuse_cameras
from armature.components.robots.evaluation.run import Evaluation
from armature.components.robots.evaluation.schedule import noise_seed, plan_episodes
from armature.components.robots.evaluation.settings import CompareLiberoSettings, EvaluateLiberoStageSettings
from armature.components.robots.evaluation.stage import compare_libero, evaluate_policy
from armature.components.robots.evaluation.videos import chosen, differs, film, side_by_side, write_video
from armature.components.robots.libero.settings import PerturbationSettings
from tests.builders import make_machine
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS, Homing, Plane, settings
from tests.robots.libero.simulated import simulator

SIMULATOR = simulator(camera_name_mapping={"agentview_image": "image", "robot0_eye_in_hand_image": "wrist_image"})


class Events(TerminalEvents):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.numbers: dict[str, float] = {}

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        self.lines.append(f"{name} {done}/{total}")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.numbers.update(values)

    def message(self, text: str) -> None:
        self.lines.append(text)


def context(folder: Path, events: Events, **machine: Any) -> StageContext:
    facts = make_machine(store=folder / "store", **machine)
    (folder / "work").mkdir(exist_ok=True)
    return StageContext(facts, events, ThreadUnits(), folder / "work", folder / "images", "f")


def evaluate(folder: Path, policy: Homing, plane: Plane, **changes: Any) -> tuple[Path, Events, StageReport]:
    folder.mkdir(exist_ok=True)
    out, events = folder / "out", Events()
    out.mkdir()
    chosen = EvaluateLiberoStageSettings(simulator=SIMULATOR, evaluation=settings(**changes))
    report = evaluate_policy(policy, {"libero_spatial": TASKS}, [plane], chosen, out, context(folder, events))
    return out, events, report


def test_evaluation_writes_results_metrics_videos_and_report(tmp_path: Path) -> None:
    out, events, report = evaluate(tmp_path, Homing(), Plane(deaths=(7,)), batch=3)
    results = read_results(out)
    numbers = json.loads((out / "metrics.json").read_text())
    info = json.loads((out / "eval_info.json").read_text())
    solved = sum(result.success for result in results)
    assert numbers["success"] == solved / 21 == info["overall"]["avg_max_reward"]
    assert events.numbers["success"] == numbers["success"]
    assert events.lines[20] == "episodes 21/21"
    videos = sorted(str(path.relative_to(out)) for path in out.rglob("*.mp4"))
    assert sorted(info["overall"]["video_paths"]) == videos
    assert report.rows == {"episodes": 21, "videos": len(videos)}
    assert list(report.drops) == ["attempts lost with their simulator"]
    page = (out / "report.html").read_text()
    assert all(f'href="{video}"' in page for video in videos)
    assert page.count("data:image/webp") == len(videos)
    assert "reach number 2" in page


def evaluated_twice(folder: Path, **changes: Any) -> dict[str, Artifact]:
    """Return the evaluations of two policies. The second policy has less noise."""
    paths = {}
    for name, noise in (("first", 1.4), ("second", 0.5)):
        out, _, _ = evaluate(folder / name, Homing(noise), Plane(), **changes)
        paths[name] = Artifact(kind="evaluate-libero", path=out, digest=name * 3)
    (folder / "compared").mkdir()
    return paths


def test_comparison_of_two_policies_on_the_same_episodes(tmp_path: Path) -> None:
    paths, events = evaluated_twice(tmp_path, videos_per_task=0), Events()
    settings = CompareLiberoSettings(confidence=0.95)
    report = compare_libero(settings, paths, tmp_path / "compared", context(tmp_path, events))
    compared = json.loads((tmp_path / "compared/comparison.json").read_text())
    first, second = (read_results(paths[name].path) for name in ("first", "second"))
    turned = sum(b.success and not a.success for a, b in zip(first, second, strict=True))
    assert compared["all"]["only_second"] == turned > 0
    assert list(compared) == ["all", "libero_spatial", *(f"libero_spatial/{k}" for k in range(3))]
    assert report.rows == {"pairs": 21, "videos": 0}
    assert events.numbers["p_value"] == compared["all"]["p_value"] < 0.05
    assert "second, secondse against first, firstfir" in (tmp_path / "compared/report.html").read_text()


def test_episodes_filmed_by_both_are_shown_side_by_side(tmp_path: Path) -> None:
    paths, out = evaluated_twice(tmp_path), tmp_path / "compared"
    report = compare_libero(CompareLiberoSettings(), paths, out, context(tmp_path, Events()))
    filmed = [{str(path.relative_to(each.path)) for path in each.path.rglob("*.mp4")} for each in paths.values()]
    both = sorted(set.intersection(*filmed))
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.mp4")) == both
    assert {f"videos/libero_spatial_{task}/eval_episode_0.mp4" for task in range(3)} <= set(both)
    assert report.rows["videos"] == len(both)
    page = (out / "report.html").read_text()
    for path in both:
        shown, left, right = (frames(folder / path) for folder in (out, paths["first"].path, paths["second"].path))
        assert len(shown) == max(len(left), len(right)) and f'href="{path}"' in page
        assert shown[0].shape == (16, 72, 3)
        for here, there in ((shown[0][:, :28], left[0][:, :28]), (shown[-1][:, 44:], right[-1][:, 4:])):
            assert np.abs(here.astype(int) - there).mean() < 6  # encoded twice


def frames(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


def test_rejects_cameras_that_the_simulator_lacks() -> None:
    refuse_cameras(("observation.images.wrist_image",), libero_robot(SIMULATOR))
    with refused("simulator_camera_missing", "observation.images.image2", "simulator.camera_name_mapping"):
        refuse_cameras(("observation.images.image", "observation.images.image2"), libero_robot(SIMULATOR))


PERTURBATIONS = PerturbationSettings(camera=(0.5, 1.0), language=(0.0,))
LABELS = ["camera/0.5", "camera/1", "language/0"]


def test_each_perturbation_repeats_every_planned_episode() -> None:
    chosen = settings(perturbations=PERTURBATIONS)
    planned = plan_episodes(chosen, {"libero_spatial": TASKS})
    plain = plan_episodes(settings(), {"libero_spatial": TASKS})
    assert planned[:21] == plain and len(planned) == 4 * 21 == len({each.key for each in planned})
    for place, each in enumerate(planned[21:]):
        alike = plain[place % 21]
        assert each.key == (*alike.key, LABELS[place // 21]) and each.perturbation is not None
        assert (each.initial_state, each.simulator_seed) == (alike.initial_state, alike.simulator_seed)
        assert noise_seed(chosen, each, 3) == noise_seed(chosen, alike, 3)


def test_perturbed_success_is_compared_with_unperturbed_episodes(tmp_path: Path) -> None:
    """Wilson's lower limit: (p + z^2/2n - z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
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


def test_without_perturbations_no_files_or_metrics_are_added(tmp_path: Path) -> None:
    with_them, _, _ = evaluate(tmp_path / "with", Homing(), Plane(), perturbations=PERTURBATIONS)
    without, _, report = evaluate(tmp_path / "without", Homing(), Plane())
    assert (with_them / "results.parquet").read_bytes() == (without / "results.parquet").read_bytes()
    assert not (without / "perturbed.parquet").exists() and "perturbed episodes" not in report.rows
    assert "perturbations" not in json.loads((without / "metrics.json").read_text())
    page = (without / "report.html").read_text()
    assert "With perturbations" not in page and "By perturbation" not in page


def test_results_are_identical_across_processes_batches_and_crashes(tmp_path: Path) -> None:
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


def test_comparison_uses_perturbations_that_both_evaluations_have(tmp_path: Path) -> None:
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


def test_rejects_invalid_perturbation_settings() -> None:
    with refused("value_error", "robot"):
        PerturbationSettings(robot=(0.5, 0.5))
    layout = settings(perturbations=PerturbationSettings(layout=(0.5,)))
    with refused("value_error", "simulator.num_steps_wait is 2"):
        EvaluateLiberoStageSettings(simulator=simulator(), evaluation=layout)


def test_films_first_successes_and_failures_exactly_as_played(tmp_path: Path) -> None:
    plan = settings()
    planned = plan_episodes(plan, {"libero_spatial": TASKS})
    journal = EvaluationJournal(tmp_path / "episodes.jsonl")
    outcomes = Evaluation(plan, planned, journal, lambda finished, latest: None).run(Homing(), [Plane()])
    picked = chosen(planned, outcomes, 1)
    for task in TASKS:
        of_task = [each for each in planned if each.task == task]
        firsts = [next((e for e in of_task if outcomes[e.key].success is end), None) for end in (True, False)]
        assert {e.key for e in firsts if e} == {each.key for each in picked if each.task == task}
    plane = Plane(deaths=(2,))
    filmed = list(film(picked, outcomes, plane, attempts=2))
    assert [differs(played, outcomes[episode.key]) for episode, played in filmed] == [None] * len(picked)
    assert all(len(played.frames) == played.steps + 1 for _, played in filmed)
    assert chosen(planned, outcomes, 0) == []


def test_differing_repetition_is_described() -> None:
    actions = np.zeros((4, 7), np.float32)
    last = RobotObservation({}, np.zeros(8, np.float32), "")
    assert differs(PlayedEpisode(False, actions, last), EpisodeOutcome(True, actions, None, 0, 0.0)) == (
        "played again, it ended with success False after 4 steps; before, with success True after 4"
    )


def test_videos_show_every_frame_of_all_cameras(tmp_path: Path) -> None:
    episode = plan_episodes(settings(), {"libero_spatial": TASKS})[8]
    moments = [
        {"a": np.full((33, 32, 3), 8 * k, np.uint8), "b": np.full((33, 32, 3), 255 - 8 * k, np.uint8)}
        for k in range(30)
    ]
    path = write_video(tmp_path, episode, moments, fps=20)
    assert path == "videos/libero_spatial_1/eval_episode_1.mp4"
    with av.open(str(tmp_path / path)) as container:
        assert container.streams.video[0].average_rate == 20
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 30
    for image, moment in zip(frames, moments, strict=True):
        expected = side_by_side(moment)
        assert image.shape == expected.shape == (32, 64, 3)
        assert np.abs(image.astype(int) - expected).mean() < 4


@pytest.mark.parametrize("strengths", [(0.5, 0.5), (0.5, 0.5000001)])
def test_strengths_with_one_label_are_refused(strengths: tuple[float, float]) -> None:
    """The label is part of an episode's key, so one episode would be played for both."""
    with pytest.raises(ValidationError):
        PerturbationSettings(camera=strengths)
    assert len(PerturbationSettings(camera=(0.5, 0.51)).listed()) == 2
