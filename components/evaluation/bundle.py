"""A bundle: the claims of an evaluation in one .zip file, with which a stranger can check it.

bundle.json      settings, environment, versions, digests of policy and tasks, metrics
episodes.jsonl   one row per planned episode: task, seed, outcome, digests of the sampled tokens and their log-probs
rollouts.jsonl   a sample of the episodes with messages, completions and token ids
images/          the images of this sample, by their SHA-256

A bundle holds data only. Reading one imports nothing that it names, and writes no file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import isclose
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import to_json

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import read_manifest
from armature.components.contracts.digests import document_digest
from armature.components.contracts.episodes import Split, Task
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import foreign, regular
from armature.components.contracts.images import ImageRef
from armature.components.contracts.metrics import read_finite
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.contracts.stages import Artifact
from armature.components.environments.stage import read_environment
from armature.components.evaluation.results import EpisodeResult, collect_results, metrics, planned_tasks
from armature.components.evaluation.settings import EvaluateStageSettings, EvaluationSettings
from armature.components.evaluation.stage import METRICS_FILE, checkpoint_folder
from armature.components.models.source import checkpoint_sha256
from armature.components.rollouts.play import RolloutId
from armature.components.rollouts.table import read_rollouts

CLAIMS_FILE, EPISODES_FILE, ROLLOUTS_FILE = "bundle.json", "episodes.jsonl", "rollouts.jsonl"
MAX_FILE_BYTES = 2**28
"""Largest size in bytes of each file of a bundle."""
SAMPLED_ROLLOUTS = 8
"""Number of episodes in the sample of rollouts."""


class Claims(BaseModel):
    """The claims about an evaluation as a whole.

    Attributes:
        settings: sections `evaluation` and `inference` of the recipe as they were used.
        environment: section `environment`.
        sources: digests of the environment's code and data.
        policy: digest of the policy's artifact.
        policy_sha256: SHA-256 of the policy's weights, configuration and tokenizer.
        tasks: digest of the tasks of each played split.
        armature: version of the package that made the artifact.
        versions: see `components/machine/versions.py`; empty if they were not recorded.
        metrics: the content of `metrics.json`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bundle_version: Literal[1] = 1
    settings: dict[str, Any]
    environment: dict[str, Any]
    sources: dict[str, str]
    policy: str
    policy_sha256: str
    tasks: dict[Split, str]
    armature: str
    versions: dict[str, str]
    metrics: dict[str, Any]


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


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle: the claims about the evaluation and about each episode, and a sample of rollouts."""

    claims: Claims
    episodes: tuple[EpisodeClaim, ...]
    rollouts: tuple[Mapping[str, Any], ...]


class Contradiction(NamedTuple):
    """Two parts of a bundle that cannot both be true. `code` names the claim: rows, rate, seeds, sample or versions."""

    code: str
    detail: str


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


def make_bundle(evaluation: Artifact, tasks: Artifact, policy: Artifact, versions: Mapping[str, str]) -> Bundle:
    """Return the bundle of a finished evaluation, from its artifact and the artifacts that it was made from.

    Raises:
        DataError: a table cannot be read, or there is no checkpoint.
    """
    manifest = read_manifest(evaluation.path)
    plan = EvaluateStageSettings.model_validate(manifest.settings).evaluation
    planned, outputs = planned_tasks(plan, tasks.path), read_rollouts(evaluation.path)
    claims = Claims(
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
    return Bundle(claims, tuple(episode_claims(outputs, planned, plan)), tuple(map(_rollout, sampled)))


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


def write_bundle(bundle: Bundle, target: Path, images: ImageStore) -> None:
    """Write a bundle to the .zip file `target`. Equal bundles give equal bytes."""
    refs = {ImageRef(**ref) for rollout in bundle.rollouts for turn in rollout["turns"] for ref in turn["images"]}
    files = {
        CLAIMS_FILE: bundle.claims.model_dump_json(indent=1).encode(),
        EPISODES_FILE: b"".join(to_json(asdict(each)) + b"\n" for each in bundle.episodes),
        ROLLOUTS_FILE: b"".join(to_json(each) + b"\n" for each in bundle.rollouts),
        **{f"images/{images.path(ref).name}": images.read(ref) for ref in sorted(refs, key=lambda ref: ref.sha256)},
    }
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle that a stranger may have made. Only the three tables are read, and nothing is unpacked.

    Raises:
        DataError: the file is not a bundle, or a table of it is too large.
    """
    with (
        foreign("not a bundle", where=str(path), remedy="give a file that `armature bundle` wrote"),
        zipfile.ZipFile(regular(path)) as archive,
    ):
        claims = Claims.model_validate(read_finite(_member(archive, CLAIMS_FILE)))
        lines = [read_finite(line) for line in _member(archive, EPISODES_FILE).splitlines()]
        rollouts = [read_finite(line) for line in _member(archive, ROLLOUTS_FILE).splitlines()]
        episodes = TypeAdapter(list[EpisodeClaim]).validate_python(lines)
        for each in episodes:
            RolloutId.parse(each.result.trajectory_id)
        return Bundle(claims, tuple(episodes), tuple(TypeAdapter(list[dict[str, Any]]).validate_python(rollouts)))


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the content of a file of the archive. Its size in the archive's index may be wrong, so it is not used.

    Raises:
        DataError: it is larger than `MAX_FILE_BYTES`.
    """
    with archive.open(name) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise DataError(
            f"a file of the bundle has more than {MAX_FILE_BYTES} bytes",
            code="bundle_too_large",
            where=name,
            remedy="ask for a bundle of fewer episodes",
        )
    return content


def contradictions(bundle: Bundle, plan: EvaluationSettings) -> list[Contradiction]:
    """Return the contradictions within a bundle, which are found without a replay."""
    claims, rows = bundle.claims, {each.result.trajectory_id: each for each in bundle.episodes}
    problems = []
    if len(rows) < len(bundle.episodes):
        problems.append(Contradiction("rows", f"{len(bundle.episodes) - len(rows)} episodes are listed twice"))
    results = [each.result for each in bundle.episodes]
    if wrong := [each.trajectory_id for each in results if each.solved != _earns(each, plan.success_reward)]:
        problems.append(Contradiction("rows", f"{len(wrong)} rows are not solved as their reward says: {wrong[0]:.40}"))
    numbers = json.loads(json.dumps(metrics(results, plan.splits)))
    if wrong := [key for key in numbers | claims.metrics if not _close(numbers.get(key), claims.metrics.get(key))]:
        shown = f"{wrong[0]:.40} is {claims.metrics.get(wrong[0])!r:.40}, by the rows {numbers.get(wrong[0])!r:.40}"
        problems.append(Contradiction("rate", f"the summary differs from the rows: {shown}"))
    places = {name: RolloutId.parse(name) for name in rows}
    if wrong := [name for name, each in rows.items() if each.seed != places[name].request_seed(plan.seed, 0)]:
        problems.append(Contradiction("seeds", f"{len(wrong)} rows have other seeds than the plan: {wrong[0]:.40}"))
    for rollout in bundle.rollouts:
        name = str(rollout.get("trajectory_id"))
        if name not in rows or _sampled(rollout) != (rows[name].tokens, rows[name].result.reward):
            problems.append(Contradiction("sample", f"the rollout {name:.40} differs from its row"))
    made = claims.versions.get("armature", claims.armature)
    if made != claims.armature:
        problems.append(Contradiction("versions", f"made with armature {claims.armature:.40}, and with {made:.40}"))
    return problems


def plan_contradictions(bundle: Bundle, tasks: Sequence[Task], samples_per_task: int) -> list[Contradiction]:
    """Return how the rows of a bundle differ from the episodes that its settings plan. `tasks` are made here."""
    problems = []
    for split, digest in bundle.claims.tasks.items():
        if tasks_digest(tasks, split) != digest:
            problems.append(Contradiction("data", f"the tasks of {split}, made here, are others"))
    places = [RolloutId(0, group, member) for group in range(len(tasks)) for member in range(samples_per_task)]
    planned = {place.trajectory_id: tasks[place.group].task_id for place in places}
    rows = {each.result.trajectory_id: each.result.task_id for each in bundle.episodes}
    if rows != planned:
        number = sum(rows.get(name) != planned.get(name) for name in rows | planned)
        problems.append(Contradiction("rows", f"{number} rows are missing, not planned, or of another task"))
    return problems


def _earns(result: EpisodeResult, reward: float) -> bool:
    """Check that an episode was finished with at least `reward`, as `Trajectory.earns` does."""
    return result.reward is not None and (result.reward >= reward or isclose(result.reward, reward, rel_tol=1e-9))


def _close(ours: Any, claimed: Any) -> bool:
    """Check that two documents are equal, up to rounding of their numbers: releases of Python sum differently."""
    if isinstance(ours, dict) and isinstance(claimed, dict):
        return ours.keys() == claimed.keys() and all(_close(ours[key], claimed[key]) for key in ours)
    if isinstance(ours, float) and isinstance(claimed, int | float):
        return isclose(ours, claimed, rel_tol=1e-9, abs_tol=1e-12)
    return bool(ours == claimed)


def _sampled(rollout: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the digest of the sampled tokens and the reward of a rollout of the sample; None if it has none."""
    try:
        ids = b"".join(np.asarray(turn["token_ids"], np.int32).tobytes() for turn in rollout["turns"])
        return sha256(ids).hexdigest(), float(sum(turn["reward"] for turn in rollout["turns"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
