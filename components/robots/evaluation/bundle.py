"""A bundle of a LIBERO evaluation: what a stranger needs to check it.

bundle.json      settings, versions, digests of the policy, metrics
episodes.jsonl   one row per planned episode: start, seed, outcome and actions

A bundle holds data only, as in `components/evaluation/bundle.py`. Its episodes can be played again by the policy,
or from their recorded actions where the policy was computed by another program.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

from armature.components.artifacts.manifest import read_manifest
from armature.components.contracts.metrics import read_finite
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.evaluation.archive import (
    CLAIMS_FILE,
    EPISODES_FILE,
    Claims,
    opened,
    write_files,
)
from armature.components.models.source import checkpoint_sha256, locate
from armature.components.robots.evaluation.compare import all_metrics
from armature.components.robots.evaluation.episode import (
    Actions,
    EpisodeOutcome,
    EvaluationJournal,
    PlayedEpisode,
    play_episode,
)
from armature.components.robots.evaluation.opening import open_own
from armature.components.robots.evaluation.results import (
    LiberoResult,
    PerturbedResult,
    collect_perturbed,
    collect_results,
    read_perturbed,
    read_results,
)
from armature.components.robots.evaluation.robot import libero_robot
from armature.components.robots.evaluation.run import (
    AttemptedEpisode,
    EpisodePlayer,
    Evaluation,
    InferenceQueue,
    SimulatorSlot,
    outcome_of,
)
from armature.components.robots.evaluation.schedule import EpisodeKey, PlannedEpisode
from armature.components.robots.evaluation.settings import EvaluateLiberoStageSettings
from armature.components.robots.evaluation.stage import METRICS_FILE, open_simulators
from armature.components.robots.libero.tasks import ACTION_NAMES
from armature.components.robots.policies.source import POLICY, read_settings

JOURNAL = "replayed.jsonl"
MAX_BATCH = 32
"""Largest number of episodes that a replay plays at the same time; a bundle may ask for any."""


class RobotClaims(Claims):
    """The claims about an evaluation of stage `evaluate-libero` as a whole.

    `policy_sha256` is "" for a policy that another program computed. Its episodes are replayed from their recorded
    actions.
    """

    kind: Literal["evaluate-libero"] = "evaluate-libero"


@dataclass(frozen=True)
class RobotClaim:
    """The claim about one planned episode."""

    result: LiberoResult

    @property
    def name(self) -> str:
        """Suite, task, episode and perturbation."""
        label = f"/{self.result.label}" if isinstance(self.result, PerturbedResult) else ""
        return f"{self.result.suite}/{self.result.task}/{self.result.episode}{label}"

    @property
    def finished(self) -> bool:
        """True if the episode was played."""
        return self.result.failure is None

    @property
    def solved(self) -> bool:
        """True if the task was solved."""
        return self.result.success


@dataclass(frozen=True)
class RobotBundle:
    """The content of a bundle: the claims about the evaluation and about each episode."""

    claims: RobotClaims
    episodes: tuple[RobotClaim, ...]


def make_robot_bundle(evaluation: Artifact, policy: Artifact, versions: Mapping[str, str]) -> RobotBundle:
    """Return the bundle of a finished evaluation, from its artifact and the policy's.

    Raises:
        DataError: a table cannot be read, or there is no checkpoint.
    """
    manifest, chosen = read_manifest(evaluation.path), read_settings(policy.path)
    external = chosen is not None and chosen.external is not None
    claims = RobotClaims(
        settings=manifest.settings,
        policy=policy.digest,
        policy_sha256="" if external else policy_sha256(policy.path),
        armature=manifest.code_version,
        versions=dict(versions),
        metrics=json.loads((evaluation.path / METRICS_FILE).read_bytes()),
    )
    results = [*read_results(evaluation.path), *read_perturbed(evaluation.path)]
    return RobotBundle(claims, tuple(map(RobotClaim, results)))


def policy_sha256(source: Path) -> str:
    """Return the SHA-256 of the files of a policy's checkpoint, or of the checkpoint in an artifact."""
    return checkpoint_sha256(locate(source, kind=POLICY), POLICY.content)


def write_robot_bundle(bundle: RobotBundle, target: Path) -> None:
    """Write a bundle to the .zip file `target`. Equal bundles give equal bytes."""
    rows = [
        {**vars(each.result), "actions": b64encode(np.array(each.result.actions, "<f4").tobytes()).decode()}
        for each in bundle.episodes
    ]
    files = {
        CLAIMS_FILE: bundle.claims.model_dump_json(indent=1).encode(),
        EPISODES_FILE: b"".join(to_json(row) + b"\n" for row in rows),
    }
    write_files(target, files)


def read_robot_bundle(path: Path) -> RobotBundle:
    """Read a bundle that a stranger may have made.

    Raises:
        DataError: the file is not a bundle, or a table of it is too large.
    """
    with opened(path) as read:
        claims = RobotClaims.model_validate(read_finite(read(CLAIMS_FILE)))
        rows = [read_finite(line) for line in read(EPISODES_FILE).splitlines()]
        return RobotBundle(claims, tuple(RobotClaim(_result(row)) for row in rows))


def _result(row: dict[str, Any]) -> LiberoResult:
    actions = np.frombuffer(b64decode(row["actions"], validate=True), "<f4").tolist()
    kind = PerturbedResult if "perturbation" in row else LiberoResult
    result: LiberoResult = TypeAdapter(kind).validate_json(to_json({**row, "actions": []}), strict=True, extra="forbid")
    return replace(result, actions=tuple(actions))


def robot_contradictions(
    bundle: RobotBundle, settings: EvaluateLiberoStageSettings, planned: Sequence[PlannedEpisode]
) -> list[str]:
    """Return sentences about parts of a bundle that cannot all be true. No replay is needed to find them.

    Args:
        planned: the episodes that the settings plan.
    """
    results = [each.result for each in bundle.episodes]
    starts = [_start(each) for each in planned]
    listed = [
        (each.name, each.result.language, each.result.initial_state, each.result.simulator_seed)
        for each in bundle.episodes
    ]
    if listed != starts:
        wrong = sum(one != other for one, other in zip(listed, starts, strict=False))
        return [f"{len(listed)} episodes are listed, {len(starts)} planned, and {wrong} are not as planned"]
    problems = []
    limits = [each.max_steps for each in planned]
    if wrong_ends := [each.name for each, limit in zip(bundle.episodes, limits, strict=True) if not _ends(each, limit)]:
        problems.append(f"{len(wrong_ends)} rows cannot have ended so, such as {wrong_ends[0]!a:.80}")
    failed = sum(each.failure is not None for each in results)
    if failed > settings.evaluation.failed_episodes:
        problems.append(f"{failed} episodes failed, and the settings allow {settings.evaluation.failed_episodes}")
    plain = [each for each in results if not isinstance(each, PerturbedResult)]
    perturbed = [each for each in results if isinstance(each, PerturbedResult)]
    return problems + bundle.claims.contradictions(all_metrics(plain, perturbed))


def _start(planned: PlannedEpisode) -> tuple[str, str, int, int]:
    name = "/".join(map(str, planned.key))
    return name, planned.task.language, planned.initial_state, planned.simulator_seed


def _ends(claim: RobotClaim, limit: int) -> bool:
    """Check that an episode ends by its success, at its limit, or with a failure before its first step."""
    result = claim.result
    if len(result.actions) != result.steps * len(ACTION_NAMES) or not np.isfinite(result.actions).all():
        return False
    if not claim.finished:
        return not result.success and not result.steps
    return 0 < result.steps <= limit and (result.success or result.steps == limit)


def replay_episodes(
    settings: EvaluateLiberoStageSettings,
    planned: Sequence[PlannedEpisode],
    source: Path | None,
    chosen: Sequence[RobotClaim],
    context: StageContext,
) -> list[RobotClaim]:
    """Play the chosen episodes of an evaluation again.

    Args:
        planned: all planned episodes.
        source: checkpoint or artifact of the policy; None: the recorded actions are carried out.

    Returns:
        The claims that the replay gives. Episodes that could not be played are not `finished`.
    """
    claims = {each.name: each for each in chosen}
    again = [each for each in planned if _start(each)[0] in claims]
    batch = min(settings.evaluation.batch, len(again), MAX_BATCH)
    plan = settings.evaluation.model_copy(update={"batch": batch, "failed_episodes": len(again)})
    policy = open_own(source, libero_robot(settings.simulator), plan) if source is not None else None
    outcomes: dict[EpisodeKey, EpisodeOutcome] = {}

    def on_outcome(finished: Collection[EpisodeOutcome], latest: EpisodeOutcome) -> None:
        context.events.progress("episodes", len(finished), len(again))

    def carry_out(simulator: SimulatorSlot, episode: PlannedEpisode) -> PlayedEpisode:
        recorded = np.array(claims[_start(episode)[0]].result.actions, np.float32).reshape(-1, len(ACTION_NAMES))
        short = replace(episode, max_steps=len(recorded))
        return play_episode(simulator.process, simulator.slot, short, lambda _observation, _chunk: recorded)

    def keep(episode: PlannedEpisode, attempted: AttemptedEpisode[PlayedEpisode]) -> None:
        outcomes[episode.key] = latest = outcome_of(attempted)
        on_outcome(outcomes.values(), latest)

    with open_simulators(settings.simulator, context.machine, plan) as processes:
        if policy is not None:
            journal = EvaluationJournal(context.workspace / JOURNAL)
            outcomes |= Evaluation(plan, again, journal, on_outcome).run(policy, processes)
        else:
            nothing = InferenceQueue[Actions](lambda observations, seeds: [], 1, lambda observation: observation)
            EpisodePlayer(processes, batch, plan.attempts).play(again, nothing, carry_out, keep)
    results = [*collect_results(again, outcomes), *collect_perturbed(again, outcomes)]
    return [RobotClaim(each) for each in results]
