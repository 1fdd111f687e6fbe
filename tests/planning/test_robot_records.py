"""Costs of train-vla-rl from the records of a run, whose true costs are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ConfigurationError
from armature.components.planning.robots.records import (
    RobotRunRecords,
    measured_robot_runs,
    read_robot_run,
    robot_workload_of,
)
from armature.components.planning.robots.simulate import SimulatedRobotRun
from armature.components.planning.robots.workload import RobotWorkload
from armature.components.vla_rl.table import Answer, write_rollouts
from armature.components.vla_rl.updates import update_rows
from armature.plan import plan_recipe
from tests.environments.libero.simulated import needs_libero
from tests.planning.test_robots import ACTIONS, ANSWERS, CHUNK, COSTS, GROUPS, HALF, KEEP, PASS, SIZE, make_run

pytestmark = needs_libero
STEPS = 6
TRUE = COSTS.replaced({"flow": {"step_seconds": 0.5}}, "")


def known_run() -> SimulatedRobotRun:
    return make_run(costs=TRUE, workload=RobotWorkload([[HALF] * GROUPS], "by hand"), steps=2)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run to a store, as `train-vla-rl` does; its numbers are those of a simulation."""

    def store(run: SimulatedRobotRun, key: str = "a-run", policy: str = "p" * 64, slowdown: float = 1.0) -> Path:
        here, found, played = ArtifactStore(tmp_path / "store"), run.simulate(), GROUPS * SIZE
        row = {name: seconds * slowdown for name, seconds in found.timings.items()} | {
            "rollouts/planned": float(played),
            "answers/trained": found.trained_per_step,
            "updates": len(update_rows(round(found.trained_per_step), run.settings.trainer, 0)),
            "updates_dropped": 0.0,
            "timing/cpu": found.timings["timing/step"],
            "timing/simulator_reset": slowdown * played * TRUE.simulators.reset_seconds,
            "simulator/resets": played,
            "timing/simulator_step": slowdown * played * ACTIONS * TRUE.simulators.action_seconds,
            "simulator/actions": played * ACTIONS,
            "timing/policy": slowdown * played * ANSWERS * PASS,
            "policy/passes": played * ANSWERS,
            "policy/rows_per_pass": 1,
            "timing/prepare": slowdown * played * ANSWERS * 0.25 * KEEP,
            "timing/keep_answers": slowdown * played * ANSWERS * 0.75 * KEEP,
            "machine/simulators": 1,
            "machine/ranks": 1,
        }
        lineage = []
        for step in range(1, STEPS + 1):

            def fill(folder: Path, step: int = step) -> None:
                write_rollouts(folder, answers_of(run))
                _manifest(folder, "robot-rollouts", {"run": key, "step": step}, {})

            made = here.write("robot-rollouts", f"{key}-{step:05d}", fill)
            lineage.append({"step": step, "rollouts": made.digest})

        def finish(folder: Path) -> None:
            (folder / "history.json").write_text(json.dumps([row | {"step": step} for step in range(1, STEPS + 1)]))
            (folder / "lineage.json").write_text(json.dumps([{"step": 0, "evaluation": "e"}, *lineage]))
            _manifest(folder, "train-vla-rl", run.settings.model_dump(mode="json"), {"policy": policy})

        return here.write("train-vla-rl", key, finish).path

    return store


def _manifest(folder: Path, kind: str, settings: dict[str, Any], inputs: dict[str, str]) -> None:
    write_manifest(folder, kind=kind, kind_version=1, rows={}, drops={}, inputs=inputs, settings=settings)


def answers_of(run: SimulatedRobotRun) -> list[Answer]:
    nothing, rows = np.zeros(0, np.float32), []
    for number, group in enumerate(run.workload.steps[0]):
        for member, episode in enumerate(group):
            for chunk, done in enumerate(range(0, episode.actions, CHUNK)):
                executed = min(CHUNK, episode.actions - done)
                last = done + executed == episode.actions
                rows.append(
                    Answer(
                        *(f"g{number}", f"g{number}-{member}", "libero_spatial", 0, "", 0, chunk, 0, (), ()),
                        *(nothing, nothing, nothing, None, nothing.astype(np.int32), True, np.zeros(0), nothing),
                        *(executed, episode.earned * last, last, last and not episode.solved, None, 0.0),
                    )
                )
    return rows


def read(path: Path) -> RobotRunRecords:
    return read_robot_run(path, ArtifactStore(path.parent.parent))


def test_a_run_says_its_own_steps_and_what_each_part_takes(stored: Callable[..., Path]) -> None:
    records = read(stored(known_run()))
    assert [row["step"] for row in records.steps] == [3, 4, 5]  # not the first two, nor the last
    assert robot_workload_of(records).steps == [[HALF, HALF, HALF]] * 3 and records.chunk == CHUNK
    found = measured_robot_runs([records])
    assert found.costs.simulators.action_seconds == pytest.approx(TRUE.simulators.action_seconds)
    assert found.costs.policy.pass_seconds == pytest.approx(PASS) and found.costs.policy.rows == 1
    assert found.costs.flow.answer_seconds == pytest.approx(KEEP)
    assert found.costs.flow.step_seconds == pytest.approx(0.5)
    assert found.costs.sources["simulators.action_seconds"].startswith("measured")
    assert found.costs.sources["simulators.build_seconds"].startswith("not measured")
    assert found.unknown == ["batch", "train"] and found.slowdown == pytest.approx(1.0)
    assert found.runs[0].simulate().step_seconds == pytest.approx(records.mean("timing/step"))


def test_runs_whose_updates_differ_in_size_tell_apart_what_is_fixed(stored: Callable[..., Path]) -> None:
    """Updates of 24 answers, and of all 72."""
    run = known_run()
    trainer = run.settings.trainer.model_copy(update={"samples_per_update": 0})
    whole = replace(run, settings=run.settings.model_copy(update={"trainer": trainer}))
    found = measured_robot_runs([read(stored(run, key="three")), read(stored(whole, key="one"))])
    assert found.unknown == ["batch"]
    assert found.costs.trainer.answer_seconds == pytest.approx(TRUE.trainer.answer_seconds)
    assert found.costs.trainer.update_seconds == pytest.approx(TRUE.trainer.update_seconds)


def test_runs_under_different_load_are_brought_to_the_mean_of_it(stored: Callable[..., Path]) -> None:
    runs = [read(stored(known_run(), key="quiet", slowdown=1.5)), read(stored(known_run(), key="busy", slowdown=2.5))]
    found = measured_robot_runs(runs)
    assert found.slowdown == pytest.approx(2.0)
    assert found.costs.policy.pass_seconds == pytest.approx(2 * PASS)


def test_runs_that_cannot_say_it_are_refused(stored: Callable[..., Path]) -> None:
    one, other = read(stored(known_run())), read(stored(known_run(), key="other", policy="q" * 64))
    with pytest.raises(ConfigurationError, match="different policies"):
        measured_robot_runs([one, other])
    ahead = one.settings.rollouts.model_copy(update={"max_staleness": 1})
    with pytest.raises(ConfigurationError, match="played while it trains"):
        measured_robot_runs([replace(one, settings=one.settings.model_copy(update={"rollouts": ahead}))])
    path = stored(known_run(), key="old")
    rows = [
        {name: value for name, value in row.items() if not name.startswith("simulator/")}
        for row in json.loads((path / "history.json").read_text())
    ]
    (path / "history.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigurationError, match="does not say what its simulators"):
        read(path)


def test_the_plan_of_a_measured_run_is_beside_what_was_measured(stored: Callable[..., Path]) -> None:
    path = stored(known_run())
    recipe = load_recipe("train-vla-rl/tiny", ["rollouts.batch=1"])
    said = "\n".join(plan_recipe(recipe, (), "h100", [path], None, None))
    step = next(line.split() for line in said.splitlines() if line.strip().startswith("step"))
    assert float(step[1]) == pytest.approx(float(step[2]), rel=0.01)
    assert "evaluations before and after take" in said
    assert "72 of 72 answers of a step are trained on" in said


def test_the_plan_on_gpus_says_the_source_of_every_cost() -> None:
    said = "\n".join(plan_recipe(load_recipe("train-vla-rl/tiny"), (1, 8), "h100", [], None, 2.0))
    rows = [line.split() for line in said.splitlines() if line.split()[:1] in (["1"], ["8"])]
    assert [row[0] for row in rows] == ["1", "8"]
    assert float(rows[1][7]) > float(rows[0][7])  # eight GPUs do not play faster
    for line in said.partition("what this rests on")[2].splitlines()[1:-2]:
        assert any(word in line for word in ("measured", "assumed", "computed", "rollouts.")), line
