"""What a finished run took: its episodes, and the costs that its own records say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from components.artifacts.manifest import read_manifest
from components.artifacts.store import ArtifactStore
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.machine import Machine
from components.contracts.rollouts import GenerateOutputs, Trajectory
from components.inference.merge import WINDOW
from components.planning.costs import Costs, FlowCosts, ServerCosts, TrainerCosts
from components.planning.estimate import Assumptions
from components.planning.simulate import SimulatedRun
from components.planning.trainer import PlannedRollout, samples_of, training_seconds
from components.planning.workload import PlannedEpisode, PlannedTurn, Workload
from components.rl.settings import TrainVLMSettings
from components.rollouts.rounds import choose_groups, groups_that_differ
from components.rollouts.table import read_rollouts

WARM_UP = 2
"""Steps at the beginning that do not count: kernels are compiled, caches are filled."""


@dataclass(frozen=True)
class RunRecords:
    """A run by its settings, the numbers of its steps, and the rollouts of each, from the step `WARM_UP` + 1 on.

    The last step is left out: after it no weights are given to servers.
    """

    path: Path
    settings: TrainVLMSettings
    steps: Sequence[Mapping[str, float]]
    outputs: Sequence[GenerateOutputs]

    def mean(self, name: str) -> float:
        return fmean(step[name] for step in self.steps)


def read_run(path: Path) -> RunRecords:
    """The run whose artifact of train-vlm is `path`, in its store.

    Raises:
        ConfigurationError: it is not such an artifact, or has too few steps.
        DataError: its rollouts are not in the store.
    """
    manifest = read_manifest(path)
    if manifest.kind != "train-vlm":
        raise ConfigurationError(
            f"an artifact of {manifest.kind}, not of train-vlm",
            where=str(path),
            remedy="give the folder of a training that is finished: .armature/store/train-vlm/...",
        )
    history = json.loads((path / "history.json").read_text())
    steps = [row for row in history if row["step"] > WARM_UP][:-1]
    if not steps:
        raise ConfigurationError(
            f"{len(history)} steps, of which the first {WARM_UP} and the last one do not count",
            where=str(path),
            remedy=f"make at least {WARM_UP + 2}: --set trainer.max_steps=...",
        )
    store, outputs = ArtifactStore(path.resolve().parent.parent), []
    for row in steps:
        made = store.find("rollouts", f"{path.resolve().name}-{int(row['step']):05d}")
        if made is None:
            raise DataError(f"the rollouts of step {row['step']:.0f} are gone", where=str(path))
        outputs.append(read_rollouts(made.path))
    return RunRecords(path, TrainVLMSettings.model_validate(manifest.settings), steps, outputs)


def workload_of(records: RunRecords) -> Workload:
    """The episodes of the run, as they were."""
    played = [one for outputs in records.outputs for one in outputs.trajectories]
    joined = [all(_continues(one, index) for index in range(1, len(one.turns))) for one in played if len(one.turns) > 1]
    dialogue = bool(joined) and all(joined)
    alike = fmean(1 - len(groups_that_differ(outputs)) / _groups(outputs) for outputs in records.outputs)
    steps = tuple(tuple(_episode(one, dialogue) for one in outputs.trajectories) for outputs in records.outputs)
    return Workload(steps, dialogue, alike, f"measured: {len(played)} episodes of {records.path}")


def _groups(outputs: GenerateOutputs) -> int:
    return len({one.group_id for one in outputs.trajectories} | {one.group_id for one in outputs.failures})


def _continues(one: Trajectory, index: int) -> bool:
    before, turn = one.turns[index - 1], one.turns[index]
    return turn.prompt_token_ids.size >= before.prompt_token_ids.size + before.completion_token_ids.size


def _episode(one: Trajectory, dialogue: bool) -> PlannedEpisode:
    turns, known = [], 0
    for turn in one.turns:
        prompt, answer = turn.prompt_token_ids.size, turn.completion_token_ids.size
        seconds = turn.environment_seconds
        turns.append(PlannedTurn(prompt, max(1, prompt - known), answer, len(turn.images), seconds))
        known = prompt + answer if dialogue else 0
    return tuple(turns)


def measured_run(records: RunRecords, machine: Machine) -> SimulatedRun:
    """The run itself, simulated by the costs that its records say.

    The trainer's seconds are fitted to the micro-batches of each step; the server's so that a step waits as long for
    its rollouts as the run did, and that the fastest answer takes as long. What the event loop of the flow takes is
    not in the records.

    Raises:
        ConfigurationError: rollouts were played while the trainer worked, so what they took is not in the records.
    """
    settings, said = records.settings, Assumptions()
    if settings.rollouts.max_staleness:
        raise ConfigurationError(
            "a run whose rollouts are played while it trains does not say how long they took",
            where=f"rollouts.max_staleness = {settings.rollouts.max_staleness} in {records.path}",
            remedy="give a run with max_staleness = 0: what it measured holds for the others",
        )
    workload, ranks = workload_of(records), machine.trainer_nodes * machine.trainer_processes
    update, token = _fit_trainer(records, ranks, machine.trainer_context_parallel)
    run = SimulatedRun(
        rollouts=settings.rollouts,
        batches=settings.batches,
        trainer=settings.trainer,
        costs=Costs(
            servers=ServerCosts(pass_seconds=0.0, token_seconds=0.0),
            trainer=TrainerCosts(token_seconds=token, update_seconds=update),
            flow=FlowCosts(
                request_seconds=said.request_seconds,
                image_seconds=said.image_seconds,
                rollout_seconds=records.mean("timing/batch") / records.mean("rollouts/planned"),
            ),
            sync_seconds=records.mean("timing/sync"),
        ),
        workload=workload,
        servers=len(machine.endpoints) or machine.servers,
        gpus_per_server=max((len(each) for each in machine.server_gpus), default=1),
        ranks=ranks,
        sharing=machine.trainer_context_parallel,
        max_concurrent=machine.max_concurrent,
        train_tasks=settings.environment.train_tasks or 4096,
        steps=len(records.steps),
    )
    run = _fit_servers(run, records)
    measured, fields = f"measured: {records.path}", Assumptions.model_fields
    sources = dict.fromkeys(
        ("servers.pass_seconds", "servers.token_seconds", "trainer.token_seconds", "trainer.update_seconds"),
        measured + ", fitted",
    )
    sources |= dict.fromkeys(("flow.rollout_seconds", "sync_seconds"), measured + ", means")
    sources |= {f"flow.{name}": str(fields[name].description) for name in ("request_seconds", "image_seconds")}
    return replace(run, costs=run.costs.model_copy(update={"sources": sources}))


def _fit_trainer(records: RunRecords, ranks: int, sharing: int) -> tuple[float, float]:
    """Seconds of a step and of a token that explain the steps best, neither below 0."""
    settings, one_each = records.settings, TrainerCosts(token_seconds=1.0)
    tokens = []
    for outputs in records.outputs:
        chosen = choose_groups(outputs, settings.rollouts).outputs.trajectories
        differing = set(groups_that_differ(outputs))
        rollouts = [
            PlannedRollout(one.group_id, _episode(one, False))
            for one in chosen
            if one.group_id in differing or not settings.batches.skip_zero_advantage
        ]
        tokens.append(training_seconds(samples_of(rollouts, False), settings.trainer, one_each, ranks, sharing))
    seconds = np.array([step["timing/train"] for step in records.steps])
    x = np.array(tokens)
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (seconds - seconds.mean())).sum()) / spread if spread else -1.0
    least = float(seconds.mean())
    slope = min(max(slope, 0.0), least / max(float(x.mean()), 1e-12))
    return least - slope * float(x.mean()), slope


def _fit_servers(run: SimulatedRun, records: RunRecords) -> SimulatedRun:
    turns = [turn for outputs in records.outputs for one in outputs.trajectories for turn in one.turns]
    fastest = min(turns, key=lambda turn: turn.generate_seconds / turn.completion_token_ids.size)
    waited = records.mean("timing/wait_for_rollouts")

    def with_token(seconds: float) -> SimulatedRun:
        prompt = fastest.prompt_token_ids.size * seconds
        own = (fastest.generate_seconds - WINDOW - prompt) / fastest.completion_token_ids.size
        servers = run.costs.servers.model_copy(update={"token_seconds": seconds, "pass_seconds": max(0.0, own)})
        return replace(run, costs=run.costs.model_copy(update={"servers": servers}))

    return with_token(
        _rising(lambda each: with_token(each).simulate().timings["timing/wait_for_rollouts"], waited, 1.0)
    )


def _rising(function: Callable[[float], float], target: float, most: float) -> float:
    """The number between 0 and `most` where a rising function has the value `target`, to a thousandth of itself."""
    low, high = 0.0, most
    while high > 1e-9 and high - low > 1e-3 * high:
        middle = (low + high) / 2 if low else high / 8
        low, high = (low, middle) if function(middle) > target else (middle, high)
    return (low + high) / 2
