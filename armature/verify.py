"""`armature bundle` and `armature verify`: write what a stranger needs to check an evaluation, and check it.

Without a bundle, `armature verify` checks that the files of a store have not changed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from fractions import Fraction
from math import ceil
from pathlib import Path
from random import SystemRandom

from armature.bundle_checks import GivenBundle, bundle_kind, in_store, language_check, robot_check
from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import MANIFEST, open_artifact, read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import STARTED, TerminalEvents, ThreadUnits, open_store
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import is_folder
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import StageContext
from armature.components.evaluation.agreement import (
    Agreement,
    choose,
    compare,
    detection_probability,
    differences_needed,
    episodes_needed,
)
from armature.components.evaluation.bundle import make_bundle, write_bundle
from armature.components.evaluation.stage import EVALUATE_STAGE
from armature.components.machine.process import Scratch
from armature.components.robots.evaluation.bundle import make_robot_bundle, write_robot_bundle
from armature.components.robots.evaluation.stage import EVALUATE_LIBERO_STAGE


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
        name: digest or folder of the artifact of stage `evaluate` or `evaluate-libero`.

    Raises:
        DataError: there is no such evaluation, or its tasks or its policy are not in the store.
    """
    store = open_store(machine)
    digest = open_artifact(Path(name)).digest if (Path(name) / MANIFEST).is_file() else name
    evaluation = in_store(store, digest, "evaluation")
    workspace = store.workspace(evaluation.kind, evaluation.path.name)
    if evaluation.kind not in (EVALUATE_STAGE.name, EVALUATE_LIBERO_STAGE.name):
        raise DataError(
            f"a bundle is of an evaluation, and this is of stage {evaluation.kind!r}",
            code="not_an_evaluation",
            where=str(evaluation.path),
            remedy=f"give an artifact of stage {EVALUATE_STAGE.name} or {EVALUATE_LIBERO_STAGE.name}",
        )
    started, inputs = workspace / STARTED, read_manifest(evaluation.path).inputs
    recorded = json.loads(started.read_bytes()).get("versions", {}) if started.is_file() else {}
    if evaluation.kind == EVALUATE_LIBERO_STAGE.name:
        robot = make_robot_bundle(evaluation, in_store(store, inputs["policy"], "policy"), recorded)
        write_robot_bundle(robot, target)
        count = len(robot.episodes)
    else:
        tasks, model = (in_store(store, inputs[each], each) for each in ("tasks", "model"))
        bundle = make_bundle(evaluation, tasks, model, recorded)
        write_bundle(bundle, target, ImageStore(store.images))
        count = len(bundle.episodes)
    print(f"{target}: {count} episodes, {target.stat().st_size / 2**20:.1f} MiB")


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
        allowed: names in the bundle whose code may be run, see `named_code`. Robots need none.

    Raises:
        ConfigurationError: the bundle names code that is not in `allowed`.
        DataError: the bundle is refuted, cannot be read, or is of another policy; or nothing could be replayed.
    """
    file = GivenBundle(path, policy, machine)
    check = robot_check(file) if bundle_kind(path) == EVALUATE_LIBERO_STAGE.name else language_check(file, allowed)
    print(f"{path}: {check.title}")
    finished = sum(each.finished for each in check.rows)
    differing = differences_needed(confidence) if check.obstacles else 1
    number = episodes or episodes_needed(finished, share, confidence, differing)
    seed = SystemRandom().randrange(2**32) if seed is None else seed
    chosen = choose(check.rows, number, seed)
    print(f"replaying {len(chosen)} of {finished} finished episodes, chosen with --seed {seed}")
    with Scratch() as folder, closing(TerminalEvents()) as events:
        context = StageContext(machine, events, ThreadUnits(), Path(folder), Path(folder, "images"), "verify")
        replayed = check.replay(chosen, context)
    agreement = compare(chosen, replayed.claims)
    obstacles = [*check.obstacles, *([] if replayed.promised else ["the servers do not repeat"])]
    _report(agreement, finished, path, obstacles, confidence, share, replayed.drops)


def _report(
    agreement: Agreement,
    finished: int,
    path: Path,
    obstacles: Sequence[str],
    confidence: float,
    share: float,
    failed: Mapping[str, int],
) -> None:
    """Print how the replay agrees with the claims.

    Raises:
        DataError: it does not agree, or nothing was compared.
    """
    compared, different, exact = agreement.compared, len(agreement.different), not obstacles
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
        print(f"consistent with the claim: {reason} (equal bits are not promised here: {', '.join(obstacles)})")
    falsified = ceil(Fraction(str(share)) * finished)
    power = detection_probability(finished, falsified, compared, 1 if exact else differences_needed(confidence))
    print(f"if {falsified} of the {finished} rows were false, it would be found with probability {float(power):.4f}")
