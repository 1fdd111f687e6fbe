"""What a finished run took: its episodes, and the costs that its own records say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from components.artifacts.manifest import read_manifest
from components.artifacts.store import ArtifactStore
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.rollouts import GenerateOutputs, Trajectory
from components.planning.workload import PlannedEpisode, PlannedTurn, Workload
from components.rl.settings import TrainVLMSettings
from components.rollouts.rounds import groups_that_differ
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

    @property
    def slowdown(self) -> float | None:
        """Seconds that passed over those that the run's threads computed: what others compute on the same CPUs makes it
        larger. None: the run has no record of it."""
        if any("timing/cpu" not in step for step in self.steps):
            return None
        return self.mean("timing/step") / self.mean("timing/cpu")


def read_run(path: Path, store: ArtifactStore) -> RunRecords:
    """The run whose artifact of train-vlm is `path`: in a store, or linked from `store`.

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
    if path.resolve().parent.name == manifest.kind:
        store = ArtifactStore(path.resolve().parent.parent)
    digests = {row["step"]: row["rollouts"] for row in json.loads((path / "lineage.json").read_text())}
    outputs = []
    for row in steps:
        made = store.find_digest(digests[row["step"]])
        if made is None:
            raise DataError(f"the rollouts of step {row['step']:.0f} are gone", where=f"{path}, {store.root}")
        outputs.append(read_rollouts(made.path))
    return RunRecords(path, TrainVLMSettings.model_validate(manifest.settings), steps, outputs)


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
