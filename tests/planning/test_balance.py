"""The division of GPUs that the times of a run suggest."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from armature.check import share_of_gpus
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import load_recipe
from armature.components.contracts.machine import Machine
from armature.components.planning.balance import MeasuredShare, best_share, last_run, share_lines
from armature.components.rl.settings import TrainVLMSettings

IN_TURN = MeasuredShare(Path("run"), 4, 4, rollouts=9.0, train=1.0, others=2.0, overlaps=False, at_most=False)
STEP = {"wait_for_rollouts": 6.0, "batch": 0.5, "train": 2.0, "save": 0.25, "sync": 1.25}


def settings_of(*changes: str) -> TrainVLMSettings:
    settings = load_recipe("train-vlm/colors", list(changes)).settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    return settings


def store_run(store: ArtifactStore, key: str, settings: TrainVLMSettings, servers: int | None, at: float) -> Path:
    """Store a run of six steps; the first two and the last have other times, which must be ignored."""
    row = {f"timing/{name}": value for name, value in STEP.items()}
    row |= {"machine/servers": servers, "machine/ranks": 2} if servers else {}
    odd = row | {"timing/train": 100.0}
    rows = [(row if 2 < step < 6 else odd) | {"step": step} for step in range(1, 7)]

    def fill(folder: Path) -> None:
        (folder / "history.json").write_text(json.dumps(rows))
        values = settings.model_dump(mode="json")
        write_manifest(folder, kind="train-vlm", kind_version=4, rows={}, drops={}, inputs={}, settings=values)

    made = store.write("train-vlm", key, fill).path
    os.utime(made / "history.json", (at, at))
    return made


def test_sequential_best_share_follows_square_root_rule() -> None:
    """The minimum of a/s + b/r with s + r = n is at s/r = sqrt(a/b)."""
    servers, ranks = best_share(IN_TURN, 4000, 1)
    assert servers / ranks == pytest.approx(sqrt(9.0 * 4 / (1.0 * 4)), rel=0.01)


def test_overlapping_best_share_balances_both_sides() -> None:
    overlapping = replace(IN_TURN, overlaps=True)
    servers, ranks = best_share(overlapping, 4000, 1)
    assert 9.0 * 4 / servers == pytest.approx(1.0 * 4 / ranks, rel=0.02)


def test_best_share_respects_gpus_per_server() -> None:
    servers, ranks = best_share(replace(IN_TURN, servers=2), 8, 2)
    assert 2 * servers + ranks == 8 and servers == 3


def test_share_lines_report_saving_of_better_share() -> None:
    report = "\n".join(share_lines(IN_TURN, 1))
    assert "4 servers and 4 ranks took 12.0 s a step" in report
    # 6 servers: 9 * 4 / 6 + 1 * 4 / 2 + 2
    assert "6 servers and 2 ranks would take 10.0 s, 17% less" in report
    even = share_lines(replace(IN_TURN, rollouts=1.0), 1)
    assert even[1] == "  no other share would save 5% of this time"


def test_share_lines_when_rollout_time_is_only_an_upper_bound() -> None:
    report = share_lines(replace(IN_TURN, overlaps=True, at_most=True), 1)
    assert "rollouts at most 9.0 s" in report[0] and "move a GPU from servers to trainer" in report[1]


def test_last_run_returns_newest_run_of_same_recipe(tmp_path: Path) -> None:
    store, settings = ArtifactStore(tmp_path), settings_of()
    assert last_run(settings, store) is None
    store_run(store, "older", settings, servers=1, at=1e9)
    newest = store_run(store, "newest", settings_of("rollouts.seed=7"), servers=3, at=2e9)
    store_run(store, "another", settings_of("rollouts.groups_per_step=16"), servers=5, at=3e9)
    store_run(store, "unknown", settings, servers=None, at=4e9)  # by a version that did not record its servers
    measured = last_run(settings, store)
    assert measured == MeasuredShare(newest, 3, 2, rollouts=6.0, train=2.0, others=2.0, overlaps=False, at_most=False)


def test_overlapping_rollout_time_is_training_plus_waiting(tmp_path: Path) -> None:
    store, settings = ArtifactStore(tmp_path), settings_of("rollouts.max_staleness=1")
    store_run(store, "ahead", settings, servers=3, at=1e9)
    measured = last_run(settings, store)
    assert measured is not None and measured.overlaps and measured.rollouts == 8.0 and not measured.at_most


def check_lines(store: Path, name: str) -> list[str]:
    recipe = load_recipe(name, [f"machine.store={store}"])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    return share_of_gpus(recipe, machine)


def test_check_reports_missing_run_and_suggestion_of_last_run(tmp_path: Path) -> None:
    name = "train-vlm/qwen3-vl"
    (report,) = check_lines(tmp_path, name)
    assert str(tmp_path) in report and f"`armature plan {name}`" in report
    settings = load_recipe(name).settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    made = store_run(ArtifactStore(tmp_path), "a-run", settings, servers=2, at=1e9)
    report, suggested = check_lines(tmp_path, name)
    assert f"in {made} 2 servers and 2 ranks took 10.0 s a step" in report
    # 3 servers: 6 * 2 / 3 + 2 * 2 / 1 + 2 = 10, no less
    assert suggested == "  no other share would save 5% of this time"


def test_check_reports_single_gpu_cannot_be_divided(tmp_path: Path) -> None:
    (report,) = check_lines(tmp_path, "train-vlm/chartqa")
    assert "nothing to divide" in report
