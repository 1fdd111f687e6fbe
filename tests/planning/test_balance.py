"""The share of GPUs that a run's seconds suggest."""

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
STEP = {"wait_for_rollouts": 6.0, "batch": 0.5, "train": 2.0, "sync": 1.5}


def settings_of(*changes: str) -> TrainVLMSettings:
    settings = load_recipe("train-vlm/colors", list(changes)).settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    return settings


def store_run(store: ArtifactStore, key: str, settings: TrainVLMSettings, servers: int | None, at: float) -> Path:
    """A run of six steps, of which the first two and the last are unlike the others."""
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


def test_in_turn_gpus_go_with_the_root_of_what_both_take() -> None:
    """min of a/s + b/r with s + r = n is at s/r = sqrt(a/b)."""
    servers, ranks = best_share(IN_TURN, 4000, 1)
    assert servers / ranks == pytest.approx(sqrt(9.0 * 4 / (1.0 * 4)), rel=0.01)


def test_at_the_same_time_both_take_equally_long() -> None:
    overlapping = replace(IN_TURN, overlaps=True)
    servers, ranks = best_share(overlapping, 4000, 1)
    assert 9.0 * 4 / servers == pytest.approx(1.0 * 4 / ranks, rel=0.02)


def test_a_server_has_all_of_its_gpus() -> None:
    servers, ranks = best_share(replace(IN_TURN, servers=2), 8, 2)
    assert 2 * servers + ranks == 8 and servers == 3


def test_what_another_share_saves_is_said() -> None:
    said = "\n".join(share_lines(IN_TURN, 1))
    assert "4 servers and 4 ranks took 12.0 s a step" in said
    # 6 servers: 9 * 4 / 6 + 1 * 4 / 2 + 2
    assert "6 servers and 2 ranks would take 10.0 s, 17% less" in said
    even = share_lines(replace(IN_TURN, rollouts=1.0), 1)
    assert even[1] == "  no other share would save 5% of it"


def test_servers_that_waited_leave_open_how_much_faster_they_were() -> None:
    said = share_lines(replace(IN_TURN, overlaps=True, at_most=True), 1)
    assert "rollouts at most 9.0 s" in said[0] and "give it a GPU of theirs" in said[1]


def test_the_newest_run_of_the_recipe_is_taken(tmp_path: Path) -> None:
    store, settings = ArtifactStore(tmp_path), settings_of()
    assert last_run(settings, store) is None
    store_run(store, "older", settings, servers=1, at=1e9)
    newest = store_run(store, "newest", settings_of("rollouts.seed=7"), servers=3, at=2e9)
    store_run(store, "another", settings_of("rollouts.groups_per_step=16"), servers=5, at=3e9)
    store_run(store, "silent", settings, servers=None, at=4e9)  # of a version that did not record it
    found = last_run(settings, store)
    assert found == MeasuredShare(newest, 3, 2, rollouts=6.0, train=2.0, others=2.0, overlaps=False, at_most=False)


def test_ahead_rollouts_take_what_the_trainer_took_and_what_was_waited_for(tmp_path: Path) -> None:
    store, settings = ArtifactStore(tmp_path), settings_of("rollouts.max_staleness=1")
    store_run(store, "ahead", settings, servers=3, at=1e9)
    found = last_run(settings, store)
    assert found is not None and found.overlaps and found.rollouts == 8.0 and not found.at_most


def check_lines(store: Path, name: str) -> list[str]:
    recipe = load_recipe(name, [f"machine.store={store}"])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    return share_of_gpus(recipe, machine)


def test_check_says_where_no_run_is_and_what_the_last_one_suggests(tmp_path: Path) -> None:
    name = "train-vlm/qwen3-vl"
    (said,) = check_lines(tmp_path, name)
    assert str(tmp_path) in said and f"`armature plan {name}`" in said
    settings = load_recipe(name).settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    made = store_run(ArtifactStore(tmp_path), "a-run", settings, servers=2, at=1e9)
    said, suggested = check_lines(tmp_path, name)
    assert f"in {made} 2 servers and 2 ranks took 10.0 s a step" in said
    # 3 servers: 6 * 2 / 3 + 2 * 2 / 1 + 2 = 10, no less
    assert suggested == "  no other share would save 5% of it"


def test_check_says_that_one_gpu_cannot_be_divided(tmp_path: Path) -> None:
    (said,) = check_lines(tmp_path, "train-vlm/chartqa")
    assert "nothing to divide" in said
