"""Checks of the bundles of evaluations: what is found without a replay, and how episodes are replayed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import open_store, run_stage
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign, is_folder
from armature.components.contracts.machine import Machine
from armature.components.contracts.metrics import read_finite
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.make import evaluated_sources
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.agreement import Claim, obstacles_to_bits
from armature.components.evaluation.archive import CLAIMS_FILE, opened
from armature.components.evaluation.bundle import (
    EvaluationBundle,
    contradictions,
    episode_claims,
    plan_contradictions,
    read_bundle,
)
from armature.components.evaluation.replay import replay
from armature.components.evaluation.results import planned_tasks
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.evaluation.stage import checkpoint_folder
from armature.components.machine.versions import policy_versions, versions
from armature.components.models.source import MODEL, CheckpointKind, checkpoint_sha256, locate
from armature.components.robots.evaluation.bundle import (
    policy_sha256,
    read_robot_bundle,
    replay_episodes,
    robot_contradictions,
)
from armature.components.robots.evaluation.schedule import plan_episodes
from armature.components.robots.evaluation.settings import EvaluateLiberoStageSettings
from armature.components.robots.libero.tasks import LiberoTask, suite_tasks
from armature.components.robots.policies.source import POLICY

MAX_TASKS = 100_000
"""Largest number of tasks of a split, or of episodes, that a bundle may ask to be made."""
MAX_SETTINGS = {
    "resolution": 1024,
    "offscreen_samples": 16,
    "num_steps_wait": 1000,
    "max_steps": 10_000,
    "rows_per_pass": 256,
    "num_inference_steps": 1000,
    "attempts": 10,
}
"""Largest values of the settings by which the memory or the time of a replayed episode grows."""
MODULE_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Pattern of MODULE:NAME, which names code of an installed package or of the current folder."""


@dataclass(frozen=True)
class GivenBundle:
    """A bundle's file, the name of its policy if the user gives one, and the machine that replays it."""

    path: Path
    policy: str | None
    machine: Machine


@dataclass(frozen=True)
class Replayed:
    """Claims that a replay gives, the number of episodes that failed by reason, and whether servers and simulators were
    found to repeat bits."""

    claims: Sequence[Claim]
    drops: Mapping[str, int]
    promised: bool = True


@dataclass(frozen=True)
class BundleCheck:
    """A bundle without contradictions, ready for the replay of some of its `rows`.

    `obstacles` are the reasons why equal bits are not promised here.
    """

    title: str
    rows: Sequence[Any]
    obstacles: Sequence[str]
    replay: Callable[[Sequence[Any], StageContext], Replayed]


def bundle_kind(path: Path) -> str:
    """Return the kind of a bundle, the name of its stage.

    Raises:
        DataError: the file is not a bundle.
    """
    with opened(path) as read:
        return str(read_finite(read(CLAIMS_FILE)).get("kind", "evaluate"))


def language_check(file: GivenBundle, allowed: Collection[str]) -> BundleCheck:
    """Check a bundle of stage `evaluate` without a replay.

    Raises:
        ConfigurationError: the bundle names code that is not in `allowed`.
        DataError: the bundle contradicts itself or the tasks made here, cannot be read, or is of another policy.
    """
    path, machine = file.path, file.machine
    bundle, here = read_bundle(path), versions(machine)
    _refuse_code(bundle, allowed)
    with foreign("the settings or rows of the bundle are not valid", where=str(path)):
        settings = EvaluateStageSettings.model_validate(bundle.claims.settings)
        environment = EnvironmentSettings.model_validate(bundle.claims.environment)
        problems = contradictions(bundle, settings.evaluation)
    _refuse_many(max(environment.train_tasks or 0, environment.heldout_tasks or 0), path)
    plan, claims = settings.evaluation, bundle.claims
    policy = _policy(file, claims.policy, MODEL)
    checkpoint = checkpoint_folder(policy) if isinstance(policy, Artifact) else policy
    _refuse_policy(checkpoint_sha256(checkpoint), claims.policy_sha256, checkpoint)
    tasks = run_stage("tasks", environment, {}, machine)
    planned = planned_tasks(plan, tasks.path)
    same_environment = evaluated_sources(environment) == claims.sources
    problems += plan_contradictions(bundle, planned, plan.samples_per_task)
    other_code = "the environment's code or data here differ: install the bundle's version"
    _refuse_contradictions(problems, path, "" if same_environment else other_code)

    def again(chosen: Sequence[Any], context: StageContext) -> Replayed:
        outputs, promised = asyncio.run(replay(settings, planned, tasks.path, checkpoint, chosen, context))
        return Replayed(episode_claims(outputs, planned, plan), outputs.drops, promised)

    generated = not list(named_code(claims.environment))
    environments = {"tasks that are not generated": generated, "the environment's code or data": same_environment}
    obstacles = [name for name, same in environments.items() if not same] + obstacles_to_bits(claims.versions, here)
    title = (
        f"{len(bundle.episodes)} episodes of {environment.name}, accuracy {claims.metrics['accuracy']:.3f}\n"
        f"{_not_defaults(environment)}\n{_not_defaults(settings)}\n"
        "the rows agree with the summary, the seeds, the tasks made here and the sample of rollouts"
    )
    return BundleCheck(title, bundle.episodes, obstacles, again)


def robot_check(file: GivenBundle) -> BundleCheck:
    """Check a bundle of stage `evaluate-libero` without a replay.

    Raises:
        ConfigurationError: a task of the bundle is not in LIBERO.
        DataError: the bundle contradicts itself, cannot be read, or is of another policy.
    """
    path, bundle = file.path, read_robot_bundle(file.path)
    claims = bundle.claims
    with foreign("the settings of the bundle are not valid", where=str(path)):
        settings = EvaluateLiberoStageSettings.model_validate(claims.settings)
    simulator = settings.simulator.model_copy(update={"trusted_initial_states": ()})  # which could be a pickle
    settings, plan = settings.model_copy(update={"simulator": simulator}), settings.evaluation
    _refuse_large(settings, path)
    tasks: dict[str, Sequence[LiberoTask]] = {suite: suite_tasks(suite) for suite in plan.suites}
    repetitions = plan.episodes_per_task * (1 + len(plan.perturbations.listed()))
    _refuse_many(repetitions * sum(len(each) for each in tasks.values()), path)
    planned = plan_episodes(plan, tasks)
    with foreign("the rows of the bundle are not valid", where=str(path)):
        problems = robot_contradictions(bundle, settings, planned)
    _refuse_contradictions(problems, path)
    source: Path | None = None
    if claims.policy_sha256 or file.policy is not None:
        policy = _policy(file, claims.policy, POLICY)
        source = policy.path if isinstance(policy, Artifact) else policy
        _refuse_policy(policy_sha256(source), claims.policy_sha256, source)

    def again(chosen: Sequence[Any], context: StageContext) -> Replayed:
        rows = replay_episodes(settings, planned, source, chosen, context)
        failed = sum(not each.finished for each in rows)
        return Replayed(rows, {"could not be played": failed} if failed else {})

    here, claimed = policy_versions(file.machine), claims.versions
    if source is None:  # no policy computes
        here, claimed = ({**each, "device": "cpu"} for each in (here, claimed))
    replays = "the policy" if source is not None else "the recorded actions, as another program computed the policy:"
    title = (
        f"{len(bundle.episodes)} episodes of {', '.join(plan.suites)}, success {claims.metrics['success']:.3f}\n"
        f"{_not_defaults(settings)}\n"
        f"the rows agree with the summary, the seeds and the planned episodes; {replays} will be played"
    )
    return BundleCheck(title, bundle.episodes, obstacles_to_bits(claimed, here), again)


def _not_defaults(section: BaseModel) -> str:
    """Return the settings that are not the defaults as JSON, in which control characters are escaped."""
    return f"settings that are not the defaults: {json.dumps(section.model_dump(mode='json', exclude_defaults=True))}"


def named_code(values: Any) -> Iterator[str]:
    """Yield the names in the settings of an environment that lead to code other than Armature's generated tasks.

    These are all environments that may run programs, read files or ask servers, and every MODULE:NAME.

    Example:
        >>> list(named_code({"name": "colors", "args": {}, "tools": ["zoom", "own:tool"]}))
        ['own:tool']
    """
    if isinstance(values, str):
        if MODULE_NAME.fullmatch(values):
            yield values
    elif isinstance(values, Mapping):
        name = values.get("name")
        if "args" in values and isinstance(name, str) and ":" not in name:
            made = ENVIRONMENTS[name] if name in ENVIRONMENTS else None  # noqa: SIM401 (a registry has no `get`)
            if not getattr(made, "draws_only", False):
                yield name
        for value in values.values():
            yield from named_code(value)
    elif isinstance(values, Sequence):
        for value in values:
            yield from named_code(value)


def _refuse_code(bundle: EvaluationBundle, allowed: Collection[str]) -> None:
    if missing := sorted({*named_code(bundle.claims.environment)} - {*allowed}):
        raise ConfigurationError(
            f"the bundle names code to run: {', '.join(map(ascii, missing)):.400}",
            code="bundle_names_code",
            where=f"environment = {json.dumps(bundle.claims.environment):.2000}",
            remedy="if you trust that, name it: " + " ".join(f"--allow {name!a}" for name in missing),
        )


def _refuse_many(count: int, path: Path) -> None:
    if count > MAX_TASKS:
        raise DataError(
            f"the bundle has more than {MAX_TASKS} tasks", code="bundle_has_too_many_tasks", where=str(path)
        )


def _refuse_large(settings: EvaluateLiberoStageSettings, path: Path) -> None:
    plan = settings.evaluation
    values = {**settings.simulator.model_dump(), **plan.model_dump(), "max_steps": max(plan.max_steps.values())}
    if large := [f"{name} = {values[name]!s:.20}" for name, most in MAX_SETTINGS.items() if (values[name] or 0) > most]:
        raise DataError(
            f"the bundle asks for too much: {', '.join(large)}",
            code="bundle_asks_too_much",
            where=str(path),
            remedy="the largest values are " + ", ".join(f"{name} = {most}" for name, most in MAX_SETTINGS.items()),
        )


def _refuse_contradictions(problems: Sequence[str], path: Path, remedy: str = "") -> None:
    if problems:
        raise DataError(
            f"the bundle cannot be true: {'; '.join(problems)}",
            code="bundle_contradicts_itself",
            where=str(path),
            remedy=remedy,
        )


def _policy(file: GivenBundle, digest: str, kind: CheckpointKind) -> Artifact | Path:
    """Return the policy: an artifact of the store, or the folder of a checkpoint."""
    name = file.policy
    if name is None or not (is_folder(name) or "/" in name):
        return in_store(open_store(file.machine), name or digest, "policy")
    source, _, revision = name.partition("@") if not is_folder(name) else (name, "", "")
    return locate(source, revision or None, kind)


def _refuse_policy(sha256: str, claimed: str, checkpoint: Path) -> None:
    if sha256 != claimed:
        raise DataError(
            f"this is another policy than the bundle's: {sha256}, not {claimed!a:.66}",
            code="policy_differs",
            where=str(checkpoint),
            remedy="ask for the policy with that SHA-256, and name it with --policy",
        )


def in_store(store: ArtifactStore, digest: str, noun: str) -> Artifact:
    """Return the artifact of the store with that digest.

    Raises:
        DataError: the store does not have it.
    """
    artifact = store.find_digest(digest)
    if artifact is None:
        raise DataError(
            f"the {noun} is not in the store",
            code="artifact_not_in_store",
            where=f"{digest!a:.80} in {store.root}",
            remedy="name the store that has it with --store",
        )
    return artifact
