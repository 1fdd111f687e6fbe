"""`armature bundle` and `armature verify`: write what a stranger needs to check an evaluation, and check it.

Without a bundle, `armature verify` checks that the files of a store have not changed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from fractions import Fraction
from math import ceil
from pathlib import Path
from random import SystemRandom
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import MANIFEST, open_artifact, read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import STARTED, TerminalEvents, ThreadUnits, open_store, run_stage
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign, is_folder
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.make import evaluated_sources
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.bundle import (
    EvaluationBundle,
    contradictions,
    episode_claims,
    make_bundle,
    plan_contradictions,
    read_bundle,
    write_bundle,
)
from armature.components.evaluation.replay import (
    Agreement,
    choose,
    compare,
    detection_probability,
    differences_needed,
    episodes_needed,
    promises_bits,
    replay,
)
from armature.components.evaluation.results import planned_tasks
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.evaluation.stage import EVALUATE_STAGE, checkpoint_folder
from armature.components.machine.process import Scratch
from armature.components.machine.versions import versions
from armature.components.models.source import checkpoint_sha256, locate

MAX_TASKS = 100_000
"""Largest number of tasks of a split that a bundle may ask to be made."""
MODULE_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Pattern of MODULE:NAME, which names code of an installed package or of the current folder."""


def verify(root: Path) -> None:
    """Check the digest of every artifact of the store at `root`.

    Raises:
        ConfigurationError: the store does not exist.
        DataError: the files of some artifacts have changed since they were made.
    """
    if not is_folder(root):
        raise ConfigurationError(
            "the artifact store does not exist",
            code="store_missing",
            where=str(root),
            remedy="name its folder with --store",
        )
    checked = list(ArtifactStore(root).verify())
    if damaged := [error for _, error in checked if error is not None]:
        raise DataError(
            "\n".join([f"{len(damaged)} of {len(checked)} artifacts are damaged", *map(str, damaged)]),
            code="artifacts_damaged",
        )
    print(f"{len(checked)} artifact{' is' if len(checked) == 1 else 's are'} unchanged")


# --- Bundles ---


def bundle_evaluation(name: str, target: Path, machine: Machine) -> None:
    """Write the bundle of an evaluation to the .zip file `target`.

    Args:
        name: digest or folder of the artifact of stage `evaluate`.

    Raises:
        DataError: there is no such evaluation, or its tasks or its policy are not in the store.
    """
    store = open_store(machine)
    digest = open_artifact(Path(name)).digest if (Path(name) / MANIFEST).is_file() else name
    evaluation = _in_store(store, digest, "evaluation")
    if evaluation.kind != EVALUATE_STAGE.name:
        raise DataError(
            f"a bundle is of an evaluation by stage {EVALUATE_STAGE.name!r}, and this is of {evaluation.kind!r}",
            code="not_an_evaluation",
            where=str(evaluation.path),
            remedy=f"give the folder or the digest of an artifact of stage {EVALUATE_STAGE.name}",
        )
    inputs = read_manifest(evaluation.path).inputs
    tasks, policy = (_in_store(store, inputs[each], each) for each in ("tasks", "model"))
    started = store.workspace(evaluation.kind, evaluation.path.name) / STARTED
    recorded = json.loads(started.read_bytes()).get("versions", {}) if started.is_file() else {}
    bundle = make_bundle(evaluation, tasks, policy, recorded)
    write_bundle(bundle, target, ImageStore(store.images))
    print(f"{target}: {len(bundle.episodes)} episodes, {target.stat().st_size / 2**20:.1f} MiB")


def _in_store(store: ArtifactStore, digest: str, noun: str) -> Artifact:
    artifact = store.find_digest(digest)
    if artifact is None:
        raise DataError(
            f"the {noun} is not in the store",
            code="artifact_not_in_store",
            where=f"{digest:.80} in {store.root}",
            remedy="name the store that has it with --store",
        )
    return artifact


def verify_bundle(
    path: Path,
    machine: Machine,
    policy: str | None = None,
    *,
    episodes: int | None = None,
    confidence: float = 0.99,
    share: float = 0.05,
    seed: int | None = None,
    allowed: Collection[str] = (),
) -> None:
    """Check a bundle: its parts against each other, its tasks against those made here, and random episodes against
    their replay.

    Args:
        policy: folder of the policy, digest of its artifact, or NAME@REVISION of a hub; None: it is in the store.
        episodes: number of episodes to replay; None: as many as `confidence` and `share` need.
        confidence: probability with which a bundle of which `share` of the rows are false is refuted. A replay without
            promised bits refutes an honest bundle with probability 1 - `confidence` at most.
        seed: seed of the choice of episodes; None: a random one.
        allowed: names in the bundle whose code may be run, see `named_code`.

    Raises:
        ConfigurationError: the bundle names code that is not in `allowed`.
        DataError: the bundle is refuted, cannot be read, or is of another policy; or nothing could be replayed.
    """
    bundle, here = read_bundle(path), versions(machine)
    _refuse_code(bundle, allowed)
    with foreign("the settings or rows of the bundle are not valid", where=str(path)):
        settings = EvaluateStageSettings.model_validate(bundle.claims.settings)
        environment = EnvironmentSettings.model_validate(bundle.claims.environment)
        problems = contradictions(bundle, settings.evaluation)
    if max(environment.train_tasks or 0, environment.heldout_tasks or 0) > MAX_TASKS:
        raise DataError(
            f"the bundle has more than {MAX_TASKS} tasks", code="bundle_has_too_many_tasks", where=str(path)
        )
    plan = settings.evaluation
    checkpoint = _policy(bundle, policy, machine)
    tasks = run_stage("tasks", environment, {}, machine)
    planned = planned_tasks(plan, tasks.path)
    same_environment = evaluated_sources(environment) == bundle.claims.sources
    if problems := [*problems, *plan_contradictions(bundle, planned, plan.samples_per_task)]:
        raise DataError(
            f"the bundle cannot be true: {'; '.join(problems)}",
            code="bundle_contradicts_itself",
            where=str(path),
            remedy=""
            if same_environment
            else "the environment's code or data here differ: install the bundle's version",
        )
    accuracy = bundle.claims.metrics["accuracy"]
    print(f"{path}: {len(bundle.episodes)} episodes of {environment.name}, accuracy {accuracy:.3f}")
    print("the rows agree with the summary, the seeds, the tasks made here and the sample of rollouts")

    generated = not list(named_code(bundle.claims.environment))
    exact = generated and same_environment and promises_bits(bundle.claims.versions, here)
    finished = sum(each.result.failure is None for each in bundle.episodes)
    differing = 1 if exact else differences_needed(confidence)
    number = episodes or episodes_needed(finished, share, confidence, differing)
    seed = SystemRandom().randrange(2**32) if seed is None else seed
    chosen = choose(bundle.episodes, number, seed)
    print(f"replaying {len(chosen)} of {finished} finished episodes, chosen with --seed {seed}")
    with Scratch() as folder, closing(TerminalEvents()) as events:
        context = StageContext(machine, events, ThreadUnits(), Path(folder), Path(folder, "images"), "verify")
        outputs, promised = asyncio.run(replay(settings, planned, tasks.path, checkpoint, chosen, context))
    agreement = compare(chosen, episode_claims(outputs, planned, plan))
    _report(agreement, finished, path, exact and promised, confidence, share, outputs.drops)


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


def _policy(bundle: EvaluationBundle, name: str | None, machine: Machine) -> Path:
    """Return the checkpoint folder of the policy, whose digest is the one in the bundle."""
    store = open_store(machine)
    if name is None or not (is_folder(name) or "/" in name):
        checkpoint = checkpoint_folder(_in_store(store, name or bundle.claims.policy, "policy"))
    else:
        source, _, revision = name.partition("@") if not is_folder(name) else (name, "", "")
        checkpoint = locate(source, revision or None)
    if (digest := checkpoint_sha256(checkpoint)) != bundle.claims.policy_sha256:
        raise DataError(
            f"this is another policy than the bundle's: {digest}, not {bundle.claims.policy_sha256:.64}",
            code="policy_differs",
            where=str(checkpoint),
            remedy="ask for the policy with that SHA-256, and name it with --policy",
        )
    return checkpoint


def _report(
    agreement: Agreement,
    finished: int,
    path: Path,
    exact: bool,
    confidence: float,
    share: float,
    failed: Mapping[str, int],
) -> None:
    """Print how the replay agrees with the claims.

    Raises:
        DataError: it does not agree, or nothing was compared.
    """
    compared, different = agreement.compared, len(agreement.different)
    if failed:
        print(f"not replayed: {', '.join(f'{count} {reason}' for reason, count in sorted(failed.items()))}")
    if not compared:
        raise DataError("no episode could be replayed", code="nothing_replayed", where=str(path))
    counts = f"{agreement.only_claimed} solved in the bundle alone, {agreement.only_replayed} in the replay alone"
    reason = "bits are promised" if exact else f"{counts}, p = {agreement.p:.2g}"
    if different if exact else agreement.p <= 1 - confidence:
        raise DataError(
            f"{different} of {compared} replayed episodes differ, and the claim is refuted: {reason}",
            code="bundle_refuted",
            where=f"{path}: {', '.join(agreement.different[:5])}",
        )
    print(f"equal bit for bit: {compared - different} of {compared}")
    if not exact:
        print(f"consistent with the claim: {reason} (equal bits are not promised here)")
    falsified = ceil(Fraction(str(share)) * finished)
    power = detection_probability(finished, falsified, compared, 1 if exact else differences_needed(confidence))
    print(f"if {falsified} of the {finished} rows were false, it would be found with probability {float(power):.4f}")
