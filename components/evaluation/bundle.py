"""A bundle: the claims of an evaluation in one .zip file, with which a stranger can check it.

bundle.json      settings, environment, versions, digests of policy and tasks, metrics
episodes.jsonl   one row per planned episode: task, seed, outcome, digests of the sampled tokens and their log-probs
rollouts.jsonl   a sample of the episodes with messages, completions and token ids
images/          the images of this sample, by their SHA-256

A bundle holds data only. Reading one imports nothing that it names, and writes no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import read_manifest
from armature.components.contracts.digests import document_digest
from armature.components.contracts.episodes import Split, Task
from armature.components.contracts.images import ImageRef
from armature.components.contracts.metrics import read_finite
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.contracts.stages import Artifact
from armature.components.environments.stage import read_environment
from armature.components.evaluation.archive import (
    CLAIMS_FILE,
    EPISODES_FILE,
    Claims,
    opened,
    write_files,
)
from armature.components.evaluation.results import EpisodeResult, collect_results, metrics, planned_tasks
from armature.components.evaluation.settings import EvaluateStageSettings, EvaluationSettings
from armature.components.evaluation.stage import METRICS_FILE, checkpoint_folder
from armature.components.models.source import checkpoint_sha256
from armature.components.rollouts.play import RolloutId
from armature.components.rollouts.table import read_rollouts

ROLLOUTS_FILE = "rollouts.jsonl"
SAMPLED_ROLLOUTS = 8
"""Number of episodes in the sample of rollouts."""


class LanguageClaims(Claims):
    """The claims about an evaluation of stage `evaluate` as a whole.

    Attributes:
        environment: section `environment`.
        sources: digests of the environment's code and data.
        tasks: digest of the tasks of each played split.
    """

    environment: dict[str, Any]
    sources: dict[str, str]
    tasks: dict[Split, str]


@dataclass(frozen=True)
class EpisodeClaim:
    """The claim about one planned episode.

    `seed` is the seed of its first request. `tokens` and `logprobs` are the SHA-256 of the ids (int32) and log-probs
    (float32) of all sampled tokens; None if the episode failed.
    """

    seed: int
    result: EpisodeResult
    tokens: str | None
    logprobs: str | None

    @property
    def name(self) -> str:
        """The trajectory id."""
        return self.result.trajectory_id

    @property
    def finished(self) -> bool:
        """True if the episode did not fail."""
        return self.result.failure is None

    @property
    def solved(self) -> bool:
        """True if its reward is a success."""
        return self.result.solved


@dataclass(frozen=True)
class EvaluationBundle:
    """The content of a bundle: the claims about the evaluation and about each episode, and a sample of rollouts."""

    claims: LanguageClaims
    episodes: tuple[EpisodeClaim, ...]
    rollouts: tuple[Mapping[str, Any], ...]


def episode_claims(outputs: GenerateOutputs, tasks: Sequence[Task], plan: EvaluationSettings) -> list[EpisodeClaim]:
    """Return the claim of each episode in `outputs`, sorted by trajectory id. `tasks` are all planned tasks."""
    played = {each.trajectory_id: each for each in outputs.trajectories}
    return [
        EpisodeClaim(
            RolloutId.parse(result.trajectory_id).request_seed(plan.seed, 0),
            result,
            _digest(played.get(result.trajectory_id), "completion_token_ids"),
            _digest(played.get(result.trajectory_id), "completion_logprobs"),
        )
        for result in collect_results(outputs, tasks, plan.success_reward, plan.kind_field)
    ]


def _digest(trajectory: Trajectory | None, column: str) -> str | None:
    """Return the SHA-256 of the arrays in a field of all turns; None without a trajectory."""
    if trajectory is None:
        return None
    return sha256(b"".join(getattr(turn, column).tobytes() for turn in trajectory.turns)).hexdigest()


def tasks_digest(tasks: Sequence[Task], split: Split) -> str:
    """Return the SHA-256 of the tasks of a split: their ids and payloads, in their order."""
    return document_digest([[task.task_id, task.payload] for task in tasks if task.split == split])


def make_bundle(
    evaluation: Artifact, tasks: Artifact, policy: Artifact, versions: Mapping[str, str]
) -> EvaluationBundle:
    """Return the bundle of a finished evaluation, from its artifact and the artifacts that it was made from.

    Raises:
        DataError: a table cannot be read, or there is no checkpoint.
    """
    manifest = read_manifest(evaluation.path)
    plan = EvaluateStageSettings.model_validate(manifest.settings).evaluation
    planned, outputs = planned_tasks(plan, tasks.path), read_rollouts(evaluation.path)
    claims = LanguageClaims(
        settings=manifest.settings,
        environment=read_environment(tasks.path).model_dump(mode="json"),
        sources=manifest.sources,
        policy=policy.digest,
        policy_sha256=checkpoint_sha256(checkpoint_folder(policy)),
        tasks={split: tasks_digest(planned, split) for split in plan.splits},
        armature=manifest.code_version,
        versions=dict(versions),
        metrics=json.loads((evaluation.path / METRICS_FILE).read_bytes()),
    )
    sampled = outputs.trajectories[:: -(-len(outputs.trajectories) // SAMPLED_ROLLOUTS)]
    return EvaluationBundle(claims, tuple(episode_claims(outputs, planned, plan)), tuple(map(_rollout, sampled)))


def _rollout(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON. Its turns have the messages since the last turn and the sampled tokens."""
    turns = [
        {
            "messages": turn.messages,
            "completion": turn.completion,
            "token_ids": turn.completion_token_ids.tolist(),
            "reward": turn.reward,
            "images": [asdict(image) for image in turn.images],
        }
        for turn in trajectory.turns
    ]
    return {"trajectory_id": trajectory.trajectory_id, "task_id": trajectory.task_id, "turns": turns}


def write_bundle(bundle: EvaluationBundle, target: Path, images: ImageStore) -> None:
    """Write a bundle to the .zip file `target`. Equal bundles give equal bytes."""
    refs = {ImageRef(**ref) for rollout in bundle.rollouts for turn in rollout["turns"] for ref in turn["images"]}
    files = {
        CLAIMS_FILE: bundle.claims.model_dump_json(indent=1).encode(),
        EPISODES_FILE: b"".join(to_json(asdict(each)) + b"\n" for each in bundle.episodes),
        ROLLOUTS_FILE: b"".join(to_json(each) + b"\n" for each in bundle.rollouts),
        **{f"images/{images.path(ref).name}": images.read(ref) for ref in sorted(refs, key=lambda ref: ref.sha256)},
    }
    write_files(target, files)


def read_bundle(path: Path) -> EvaluationBundle:
    """Read a bundle that a stranger may have made. Only the three tables are read, and nothing is unpacked.

    Raises:
        DataError: the file is not a bundle, or a table of it is too large.
    """
    with opened(path) as read:
        claims = LanguageClaims.model_validate(read_finite(read(CLAIMS_FILE)))
        lines = to_json([read_finite(line) for line in read(EPISODES_FILE).splitlines()])
        sampled = [read_finite(line) for line in read(ROLLOUTS_FILE).splitlines()]
        rollouts = TypeAdapter(list[dict[str, Any]]).validate_python(sampled)
        episodes = TypeAdapter(list[EpisodeClaim]).validate_json(lines, strict=True, extra="forbid")
        for each in episodes:
            RolloutId.parse(each.name)
        return EvaluationBundle(claims, tuple(episodes), tuple(rollouts))


def contradictions(bundle: EvaluationBundle, plan: EvaluationSettings) -> list[str]:
    """Return sentences about parts of a bundle that cannot all be true. No replay is needed to find them."""
    claims, rows = bundle.claims, {each.result.trajectory_id: each for each in bundle.episodes}
    problems = []
    if len(rows) < len(bundle.episodes):
        problems.append(f"{len(bundle.episodes) - len(rows)} episodes are listed twice")
    results = [each.result for each in bundle.episodes]
    if wrong := [each.trajectory_id for each in results if each.solved != _earns(each, plan.success_reward)]:
        problems.append(f"{len(wrong)} rows are not solved as their reward says, such as {wrong[0]!a:.40}")
    problems += claims.contradictions(metrics(results, plan.splits))
    seeds = {name: RolloutId.parse(name).request_seed(plan.seed, 0) for name in rows}
    if wrong := [name for name, each in rows.items() if each.seed != seeds[name]]:
        problems.append(f"{len(wrong)} rows have other seeds than the settings give, such as {wrong[0]!a:.40}")
    for rollout in bundle.rollouts:
        name = str(rollout.get("trajectory_id"))
        if name not in rows or _sampled(rollout) != (rows[name].tokens, rows[name].result.reward):
            problems.append(f"the rollout {name!a:.40} differs from its row")
            break
    return problems


def plan_contradictions(bundle: EvaluationBundle, tasks: Sequence[Task], samples_per_task: int) -> list[str]:
    """Return how the rows of a bundle differ from the episodes that its settings plan. `tasks` are made here."""
    splits = bundle.claims.tasks.items()
    problems = [
        f"the tasks of {each}, made here, are others" for each, digest in splits if tasks_digest(tasks, each) != digest
    ]
    if len(bundle.episodes) != len(tasks) * samples_per_task:
        return [*problems, f"{len(bundle.episodes)} episodes are listed, {len(tasks) * samples_per_task} are planned"]
    places = [RolloutId(0, group, member) for group in range(len(tasks)) for member in range(samples_per_task)]
    planned = {place.trajectory_id: tasks[place.group].task_id for place in places}
    rows = {each.result.trajectory_id: each.result.task_id for each in bundle.episodes}
    if rows != planned:
        problems.append(f"{sum(rows.get(name) != task for name, task in planned.items())} rows are not as planned")
    return problems


def _earns(result: EpisodeResult, reward: float) -> bool:
    """Check that an episode was finished with at least `reward`, as `Trajectory.earns` does."""
    return result.reward is not None and (result.reward >= reward or isclose(result.reward, reward, rel_tol=1e-9))


def _sampled(rollout: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the digest of the sampled tokens and the reward of a rollout of the sample; None if it has none."""
    try:
        ids = b"".join(np.asarray(turn["token_ids"], np.int32).tobytes() for turn in rollout["turns"])
        return sha256(ids).hexdigest(), float(sum(turn["reward"] for turn in rollout["turns"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
