"""Costs from the records of a run, and predicted against measured steps."""

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
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory, Turn
from armature.components.inference.merge import WINDOW
from armature.components.planning.costs import Costs
from armature.components.planning.fitting import measured_runs
from armature.components.planning.records import RunRecords, on_one_machine, read_run
from armature.components.planning.simulate import SimulatedRun
from armature.components.planning.workload import PlannedTurn, Workload
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rollouts.play import RolloutId
from armature.components.rollouts.table import write_rollouts

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
STEPS = 6


def recorded_run(staleness: int) -> SimulatedRun:
    """`train-vlm/colors` on two cores by what a run in turn measured; see `recorded.json`."""
    recipe = load_recipe("train-vlm/colors", [f"rollouts.max_staleness={staleness}"])
    settings, machine = recipe.settings_for(TrainVLMSettings), recipe.sections["machine"]
    assert isinstance(settings, TrainVLMSettings) and isinstance(machine, Machine)
    steps = [
        [(PlannedTurn(RECORDED["prompt_tokens"], RECORDED["prompt_tokens"], 2, 1, ms / 1e3),) for ms in step]
        for step in RECORDED["environment_ms"]
    ]
    return SimulatedRun(
        rollouts=settings.rollouts,
        batches=settings.batches,
        trainer=settings.trainer,
        costs=Costs.model_validate(RECORDED["costs"]),
        workload=Workload(steps, False, RECORDED["no_signal"], "recorded"),
        servers=1,
        ranks=1,
        max_concurrent=machine.max_concurrent,
        steps=len(steps),
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_measured_step_is_predicted_within_a_fifth(staleness: int) -> None:
    """In turn the costs are the run's own; one step ahead is another run, of which nothing was used."""
    predicted = recorded_run(staleness).simulate().step_seconds
    assert predicted == pytest.approx(RECORDED["measured_step_seconds"][staleness], rel=0.2)


@pytest.mark.parametrize("other", RECORDED["several"]["runs"], ids=lambda run: f"{run['groups']}-{run['slowdown']}")
def test_other_runs_are_predicted_within_a_fifth_at_their_load(other: dict[str, float]) -> None:
    """By the costs of three sizes; the load is what each run's own records say of it."""
    several, run = RECORDED["several"], recorded_run(0)
    plan = run.rollouts.model_copy(update={"groups_per_step": other["groups"]})
    run = replace(run, rollouts=plan, costs=Costs.model_validate(several["costs"]), steps=3)
    predicted = run.simulate().step_seconds
    assert predicted * other["slowdown"] / several["slowdown"] == pytest.approx(other["measured"], rel=0.2)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., RunRecords]:
    """Writes a run to a store, as `train-vlm` does, and reads it; its numbers are those of a simulation."""

    def store(
        run: SimulatedRun, kind: str = "train-vlm", key: str = "a-run", staleness: int = 0, slowdown: float = 0.0
    ) -> RunRecords:
        changes = [f"rollouts.max_staleness={staleness}", f"rollouts.groups_per_step={run.rollouts.groups_per_step}"]
        settings = load_recipe("train-vlm/colors", changes).settings_for(TrainVLMSettings)
        found, here = run.simulate(), ArtifactStore(tmp_path / "store")
        timings = {name: seconds * (slowdown or 1.0) for name, seconds in found.timings.items()}
        row = timings | {"rollouts/planned": found.samples_per_step, "turns": 1.0, "tokens/completion": 2.0}
        if slowdown:
            row["timing/cpu"] = timings["timing/step"] / slowdown
        lineage = []
        for step in range(3, STEPS):
            outputs = played(run, step)

            def fill(folder: Path, outputs: GenerateOutputs = outputs, step: int = step) -> None:
                write_rollouts(folder, outputs)
                _manifest(folder, "rollouts", {"run": key, "step": step})

            lineage.append({"step": step, "rollouts": here.write("rollouts", f"{key}-{step:05d}", fill).digest})

        def finish(folder: Path) -> None:
            (folder / "history.json").write_text(json.dumps([row | {"step": step} for step in range(1, STEPS + 1)]))
            (folder / "lineage.json").write_text(json.dumps(lineage))
            _manifest(folder, kind, settings.model_dump(mode="json"))

        return read_run(here.write(kind, key, finish).path, here)

    return store


def _manifest(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    write_manifest(folder, kind=kind, kind_version=1, rows={}, drops={}, inputs={}, settings=settings)


def played(run: SimulatedRun, step: int) -> GenerateOutputs:
    """Every answer took as long as one that is alone on the server, which is the fastest."""
    plan, servers, trajectories = run.rollouts, run.costs.servers, []
    tokens = RECORDED["prompt_tokens"] + 2
    seconds = WINDOW + 2 * servers.pass_seconds + tokens * servers.token_seconds
    for group in range(plan.groups_per_step):
        for member in range(plan.group_size):
            place = RolloutId(step, group, member)
            turns = tuple(
                _turn(index, turn, float(run.workload.has_signal(place) and member % 2), seconds)
                for index, turn in enumerate(run.workload.episode(place))
            )
            trajectories.append(
                Trajectory(place.trajectory_id, place.group_id, "colors", str(group), "train", turns, False)
            )
    return GenerateOutputs(tuple(trajectories))


def _turn(index: int, turn: PlannedTurn, reward: float, seconds: float) -> Turn:
    prompt, answer = np.zeros(turn.prompt_tokens, np.int32), np.zeros(turn.completion_tokens, np.int32)
    values: Any = (None, None, None, seconds, turn.environment_seconds)
    return Turn(index, prompt, answer, answer.astype(np.float32), "stop", 0, (), "[]", "", reward, {}, *values)


def machine_of_colors() -> Machine:
    machine = load_recipe("train-vlm/colors").sections["machine"]
    assert isinstance(machine, Machine)
    return machine


def known_run(groups: int) -> SimulatedRun:
    """Each step is like all others, and everything has a part that is fixed."""
    run = recorded_run(0)
    given: dict[str, Any] = {
        "trainer": {"update_seconds": 0.3},
        "flow": {"batch_seconds": 0.1, "step_seconds": 0.5},
    }
    plan = run.rollouts.model_copy(update={"groups_per_step": groups})
    workload = replace(run.workload.evened(), no_signal=0.0)
    return replace(run, rollouts=plan, workload=workload, costs=run.costs.replaced(given, ""), steps=STEPS)


def test_one_run_says_its_own_steps_and_within_which_bounds_others_are(stored: Callable[..., RunRecords]) -> None:
    records = stored(known_run(32))
    assert [row["step"] for row in records.steps] == [3, 4, 5]  # not the first two, nor the last
    fitted = measured_runs([records], machine_of_colors())
    assert fitted.runs[0].simulate().step_seconds == pytest.approx(records.mean("timing/step"), rel=0.03)
    assert fitted.costs.sources["servers.token_seconds"].startswith("measured")
    assert fitted.runs[0].workload.no_signal == 0
    assert fitted.unknown == ["rollouts", "batch", "train"] and fitted.slowdown is None
    half = known_run(16)
    none, all_ = (replace(half, costs=costs).simulate().step_seconds for costs in fitted.bounds)
    assert none < half.simulate().step_seconds < all_


def test_runs_of_two_sizes_tell_apart_what_is_fixed(stored: Callable[..., RunRecords]) -> None:
    """The costs are those that the runs were made by, and a third size is predicted."""
    records = [stored(known_run(16), key="half"), stored(known_run(32), key="whole")]
    fitted, true = measured_runs(records, machine_of_colors()), known_run(24).costs
    assert fitted.unknown == [] and fitted.bounds == []
    assert fitted.costs.trainer.update_seconds == pytest.approx(true.trainer.update_seconds, rel=1e-6)
    assert fitted.costs.trainer.token_seconds == pytest.approx(true.trainer.token_seconds, rel=1e-6)
    assert fitted.costs.flow.batch_seconds == pytest.approx(true.flow.batch_seconds, rel=1e-6)
    assert fitted.costs.flow.step_seconds == pytest.approx(true.flow.step_seconds, rel=0.1)
    predicted = replace(known_run(24), costs=fitted.costs).simulate().step_seconds
    assert predicted == pytest.approx(known_run(24).simulate().step_seconds, rel=0.02)


def test_runs_under_different_load_are_brought_to_the_mean_of_it(stored: Callable[..., RunRecords]) -> None:
    records = [
        stored(known_run(16), key="quiet", slowdown=1.5),
        stored(known_run(32), key="busy", slowdown=2.5),
    ]
    fitted = measured_runs(records, machine_of_colors())
    assert fitted.slowdown == pytest.approx(2.0)
    assert fitted.costs.trainer.update_seconds == pytest.approx(2.0 * 0.3, rel=1e-6)


def test_steps_on_another_number_of_servers_do_not_count(tmp_path: Path) -> None:
    """The run was resumed with another server in step 4, so a part of that step had one; `machine` is not asked."""
    history = [{"step": step, "machine/servers": 1 if step < 4 else 2, "machine/ranks": 1} for step in range(1, 9)]
    counted = history[2:-1]
    kept = on_one_machine(history, counted)
    assert [row["step"] for row in kept] == [5, 6, 7]
    records = RunRecords(tmp_path, recorded_settings(), kept, [])
    assert records.servers(Machine()) == 2 and records.ranks(Machine(trainer_processes=4)) == 1


def test_a_run_that_did_not_record_its_servers_has_those_of_the_machine(tmp_path: Path) -> None:
    records = RunRecords(tmp_path, recorded_settings(), [{"step": 3}], [])
    assert records.servers(Machine(servers=3)) == 3
    assert records.servers(Machine(endpoints=("http://127.0.0.1:1", "http://127.0.0.1:2"))) == 2
    assert records.ranks(Machine(trainer_processes=2)) == 2


def recorded_settings() -> TrainVLMSettings:
    settings = load_recipe("train-vlm/colors").settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    return settings


def test_a_run_that_does_not_say_what_rollouts_take_is_refused(stored: Callable[..., RunRecords]) -> None:
    records = stored(recorded_run(0), staleness=1)
    with pytest.raises(ConfigurationError, match="max_staleness = 1"):
        measured_runs([records], Machine())


def test_another_artifact_is_refused(stored: Callable[..., RunRecords]) -> None:
    with pytest.raises(ConfigurationError, match="an artifact of evaluate"):
        stored(recorded_run(0), kind="evaluate")
