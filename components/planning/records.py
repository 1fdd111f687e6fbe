"""What a finished run took: its episodes, and the costs that its own records say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from armature.components.artifacts.manifest import read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.planning.workload import PlannedEpisode, PlannedTurn, Workload
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rollouts.rounds import groups_that_differ
from armature.components.rollouts.table import read_rollouts

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
    left_out: int = 0
    """Steps on another number of servers or ranks than the last ones."""

    def mean(self, name: str) -> float:
        return fmean(step[name] for step in self.steps)

    def servers(self, machine: Machine) -> int:
        """How many the steps had: as they recorded it, else as `machine` says."""
        if "machine/servers" in self.steps[-1]:
            return round(self.steps[-1]["machine/servers"])
        return len(machine.endpoints) or machine.servers

    def ranks(self, machine: Machine) -> int:
        """How many the steps had: as they recorded it, else as `machine` says."""
        return round(self.steps[-1].get("machine/ranks", machine.trainer_nodes * machine.trainer_processes))

    @property
    def slowdown(self) -> float | None:
        """See `slowdown_of`."""
        return slowdown_of(self.steps)


def slowdown_of(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Seconds that passed over those that the run's threads computed: what others compute on the same CPUs makes it
    larger. None: the run has no record of it."""
    if any("timing/cpu" not in step for step in steps):
        return None
    return fmean(step["timing/step"] for step in steps) / fmean(step["timing/cpu"] for step in steps)


@dataclass(frozen=True)
class FinishedRun:
    """The steps of a run that count, and the folders of their rollouts. `left_out`: see `RunRecords`."""

    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    steps: Sequence[Mapping[str, float]]
    rollouts: Sequence[Path]
    left_out: int


def finished_run(path: Path, store: ArtifactStore, kind: str) -> FinishedRun:
    """The run whose artifact of `kind` is `path`: in a store, or linked from `store`.

    Raises:
        ConfigurationError: it is not such an artifact, or has too few steps.
        DataError: its rollouts are not in the store.
    """
    manifest = read_manifest(path)
    if manifest.kind != kind:
        raise ConfigurationError(
            f"an artifact of {manifest.kind}, not of {kind}",
            where=str(path),
            remedy=f"give the folder of a training that is finished: .armature/store/{kind}/...",
        )
    history = [row for row in json.loads((path / "history.json").read_text()) if row["step"] > 0]
    counted = [row for row in history if row["step"] > WARM_UP][:-1]
    steps = on_one_machine(history, counted)
    if not steps:
        raise ConfigurationError(
            f"{len(history)} steps, of which the first {WARM_UP} and the last one do not count",
            where=str(path),
            remedy=f"make at least {WARM_UP + 2}: --set trainer.max_steps=...",
        )
    if path.resolve().parent.name == kind:
        store = ArtifactStore(path.resolve().parent.parent)
    digests = {row["step"]: row.get("rollouts") for row in json.loads((path / "lineage.json").read_text())}
    rollouts = []
    for row in steps:
        made = store.find_digest(digests[row["step"]])
        if made is None:
            raise DataError(f"the rollouts of step {row['step']:.0f} are gone", where=f"{path}, {store.root}")
        rollouts.append(made.path)
    return FinishedRun(manifest.settings, manifest.inputs, steps, rollouts, len(counted) - len(steps))


def on_one_machine(
    history: Sequence[Mapping[str, float]], counted: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """Those of `counted` that had as many servers and ranks as the last one, from their beginning on."""

    def size(row: Mapping[str, float]) -> tuple[float | None, float | None]:
        return row.get("machine/servers"), row.get("machine/ranks")

    before = {row["step"]: earlier for earlier, row in pairwise(history)}
    return [row for row in counted if size(row) == size(before[row["step"]]) == size(counted[-1])]


def read_run(path: Path, store: ArtifactStore) -> RunRecords:
    """The run of train-vlm. Raises as `finished_run` does."""
    found = finished_run(path, store, "train-vlm")
    settings = TrainVLMSettings.model_validate(found.settings)
    return RunRecords(path, settings, found.steps, [read_rollouts(folder) for folder in found.rollouts], found.left_out)


def workload_of(records: RunRecords) -> Workload:
    """The episodes of the run, as they were."""
    played = [one for outputs in records.outputs for one in outputs.trajectories]
    joined = [all(_continues(one, index) for index in range(1, len(one.turns))) for one in played if len(one.turns) > 1]
    dialogue = bool(joined) and all(joined)
    alike = fmean(1 - len(groups_that_differ(outputs)) / _groups(outputs) for outputs in records.outputs)
    steps = tuple(tuple(episode_of(one, dialogue) for one in outputs.trajectories) for outputs in records.outputs)
    return Workload(steps, dialogue, alike, f"measured: {len(played)} episodes of {records.path}")


def _groups(outputs: GenerateOutputs) -> int:
    return len({one.group_id for one in outputs.trajectories} | {one.group_id for one in outputs.failures})


def _continues(one: Trajectory, index: int) -> bool:
    before, turn = one.turns[index - 1], one.turns[index]
    return turn.prompt_token_ids.size >= before.prompt_token_ids.size + before.completion_token_ids.size


def episode_of(one: Trajectory, dialogue: bool) -> PlannedEpisode:
    """The turns of a rollout; in a dialogue what an earlier one had is not new."""
    turns, known = [], 0
    for turn in one.turns:
        prompt, answer = turn.prompt_token_ids.size, turn.completion_token_ids.size
        seconds = turn.environment_seconds
        turns.append(PlannedTurn(prompt, max(1, prompt - known), answer, len(turn.images), seconds))
        known = prompt + answer if dialogue else 0
    return tuple(turns)
