"""Costs from the records of a run, and predicted against measured steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.artifacts.manifest import write_manifest
from components.artifacts.store import ArtifactStore
from components.configuration import load_recipe
from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.contracts.rollouts import GenerateOutputs, Trajectory, Turn
from components.inference.merge import WINDOW
from components.planning.costs import Costs
from components.planning.records import measured_run, read_run
from components.planning.simulate import SimulatedRun
from components.planning.workload import PlannedTurn, Workload
from components.rl.settings import TrainVLMSettings
from components.rollouts.play import RolloutId
from components.rollouts.table import write_rollouts

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


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run to a store, as `train-vlm` does; its numbers are those of a simulation."""

    def store(run: SimulatedRun, kind: str = "train-vlm", staleness: int = 0) -> Path:
        recipe = load_recipe("train-vlm/colors", [f"rollouts.max_staleness={staleness}"])
        settings = recipe.settings_for(TrainVLMSettings)
        found, here = run.simulate(), ArtifactStore(tmp_path / "store")
        row = found.timings | {"rollouts/planned": found.samples_per_step}
        for step in range(3, STEPS):
            outputs = played(run, step)

            def fill(folder: Path, outputs: GenerateOutputs = outputs) -> None:
                write_rollouts(folder, outputs)
                _manifest(folder, "rollouts", {})

            here.write("rollouts", f"a-run-{step:05d}", fill)

        def finish(folder: Path) -> None:
            (folder / "history.json").write_text(json.dumps([row | {"step": step} for step in range(1, STEPS + 1)]))
            _manifest(folder, kind, settings.model_dump(mode="json"))

        return here.write(kind, "a-run", finish).path

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


def test_costs_that_are_fitted_to_records_give_the_steps_of_the_records(stored: Callable[..., Path]) -> None:
    run = recorded_run(0)
    alike = replace(run.workload.evened(), no_signal=0.0)  # each step is like all others
    records = read_run(stored(replace(run, workload=alike)))
    assert [row["step"] for row in records.steps] == [3, 4, 5]  # not the first two, nor the last
    machine = load_recipe("train-vlm/colors").sections["machine"]
    assert isinstance(machine, Machine)
    fitted = measured_run(records, machine)
    assert fitted.simulate().step_seconds == pytest.approx(records.mean("timing/step"), rel=0.03)
    assert fitted.costs.sources["servers.token_seconds"].startswith("measured")
    assert fitted.workload.no_signal == 0
    faster = replace(fitted, costs=fitted.costs.replaced({"sync_seconds": 0.0}, "given"))
    assert faster.simulate().step_seconds < records.mean("timing/step")


def test_a_run_that_does_not_say_what_rollouts_take_is_refused(stored: Callable[..., Path]) -> None:
    records = read_run(stored(recorded_run(0), staleness=1))
    with pytest.raises(ConfigurationError, match="max_staleness = 1"):
        measured_run(records, Machine())


def test_another_artifact_is_refused(stored: Callable[..., Path]) -> None:
    with pytest.raises(ConfigurationError, match="an artifact of evaluate"):
        read_run(stored(recorded_run(0), kind="evaluate"))
