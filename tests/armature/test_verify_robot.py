"""`armature verify` on evaluations in LIBERO: a point in a plane stands in for the simulator, pushes for the policy."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode, b64encode
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature import load_recipe
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.metrics import write_json
from armature.components.contracts.stages import Artifact
from armature.components.machine.versions import policy_versions
from armature.components.robots.evaluation.settings import EvaluateLiberoStageSettings
from armature.components.robots.evaluation.stage import evaluate_policy
from armature.components.robots.policies.source import write_settings
from armature.verify import bundle_evaluation
from tests.builders import make_machine
from tests.evaluation.bundles import rewritten
from tests.robots.evaluation.playground import TASKS, Homing, Plane, settings
from tests.robots.evaluation.test_stage import SIMULATOR, Events, context

EPISODES = 42
PLAN = EvaluateLiberoStageSettings(
    simulator=SIMULATOR,
    evaluation=settings(
        tasks=(0, 1, 2),
        videos_per_task=0,
        perturbations={"camera": [0.5]},
    ),
)


def write_policy(store: Path, name: str, external: bool) -> Artifact:
    def fill(folder: Path) -> None:
        if external:
            write_settings(folder, load_recipe("evaluate/libero-openpi").sections["policy"])
        else:
            (folder / "checkpoint").mkdir()
            (folder / "checkpoint/model.safetensors").write_text(name)
        write_manifest(folder, kind="policy", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    return ArtifactStore(store).write("policy", name, fill)


def write_bundle_of(folder: Path, policy: Artifact, noise: float) -> Path:
    """Evaluate, and write the bundle of the evaluation."""
    name, store = f"{policy.path.name}.zip", ArtifactStore(folder / "store")

    def fill(out: Path) -> None:
        (folder / policy.path.name).mkdir()
        where = context(folder / policy.path.name, Events())
        evaluate_policy(Homing(noise), {"libero_spatial": TASKS}, [Plane()], PLAN, out, where)
        inputs, values = {"policy": policy.digest}, PLAN.model_dump(mode="json")
        write_manifest(out, kind="evaluate-libero", kind_version=3, rows={}, drops={}, inputs=inputs, settings=values)

    evaluation = store.write("evaluate-libero", policy.path.name, fill)
    machine = make_machine(store=store.root)
    workspace = store.workspace(evaluation.kind, evaluation.path.name)
    workspace.mkdir(parents=True, exist_ok=True)
    write_json(workspace / "stage.json", {"versions": policy_versions(machine)})
    bundle_evaluation(evaluation.digest, folder / name, machine)
    return folder / name


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with bundles of a policy and of one behind a server, and a store with both and a stronger policy."""
    folder = tmp_path_factory.mktemp("made")
    for name, noise in (("weak", 1.1), ("strong", 0.1), ("served", 1.1)):
        write_bundle_of(folder, write_policy(folder / "store", name, name == "served"), noise)
    return folder


@pytest.fixture
def folder(tmp_path, made, monkeypatch) -> Path:
    """A copy of the folder, in which the command runs."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)

    @contextmanager
    def planes(simulator: object, machine: object, batch: int):
        yield [Plane(), Plane()]

    def homing(source: Path, robot: object, plan: object) -> Homing:
        return Homing(0.1 if "strong" in str(source) else 1.1)

    monkeypatch.setattr("armature.components.robots.evaluation.bundle.open_simulators", planes)
    monkeypatch.setattr("armature.components.robots.evaluation.bundle.open_own", homing)
    monkeypatch.setattr("armature.bundle_checks.suite_tasks", lambda suite: TASKS)
    return tmp_path


@pytest.mark.parametrize("name", ["weak", "served"])
def test_honest_bundle_is_equal_bit_for_bit(folder, armature, name):
    done = armature("verify", f"{name}.zip", "--store", "store", "--episodes", str(EPISODES))
    assert done.code == 0 and f"equal bit for bit: {EPISODES} of {EPISODES}" in done.stdout, done.stderr
    assert ("recorded actions" in done.stdout) == (name == "served")
    assert '"perturbations": {"camera": [0.5]}' in done.stdout


def flip(rows: list[dict[str, Any]]) -> None:
    """Let an episode that reached its limit be a success."""
    next(row for row in rows if not row["success"])["success"] = True


def solve_all(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["success"] = True


def cut(rows: list[dict[str, Any]]) -> None:
    """Let an episode end before its limit, without a success."""
    row = next(row for row in rows if not row["success"])
    row |= {"steps": row["steps"] - 1, "actions": b64encode(b64decode(row["actions"])[:-28]).decode()}


def change_action(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        actions = np.frombuffer(b64decode(row["actions"]), "<f4").copy()
        actions[0] = np.nextafter(actions[0], np.float32(9))
        row["actions"] = b64encode(actions.tobytes()).decode()


def truthful_metrics(path: Path) -> Path:
    """Make the summary agree with the rows, as a careful liar does."""
    from armature.components.robots.evaluation.bundle import read_robot_bundle
    from armature.components.robots.evaluation.compare import all_metrics
    from armature.components.robots.evaluation.results import PerturbedResult

    results = [each.result for each in read_robot_bundle(path).episodes]
    perturbed = [each for each in results if isinstance(each, PerturbedResult)]
    numbers = json.loads(json.dumps(all_metrics(results[: len(results) - len(perturbed)], perturbed)))
    return rewritten(path.rename(path.with_name("draft.zip")), lambda claims: claims.update(metrics=numbers))


def nothing(document: Any) -> None: ...


LIES: dict[str, tuple[Any, Any]] = {
    "rate": (lambda claims: claims["metrics"].update(success=0.99), nothing),
    "one row, summary": (nothing, flip),
    "losses left out": (nothing, lambda rows: rows.__delitem__(slice(1, 2))),
    "an episode twice": (nothing, lambda rows: rows.__setitem__(1, rows[0])),
    "start": (nothing, lambda rows: rows[2].update(initial_state=0)),
    "simulator's seed": (nothing, lambda rows: rows[2].update(simulator_seed=0)),
    "ended early": (nothing, cut),
    "failed episodes": (nothing, lambda rows: rows[3].update(success=False, steps=0, actions="", failure="lost")),
    "settings": (lambda claims: claims["settings"]["evaluation"].update(seed=7), nothing),
    "versions": (lambda claims: claims["versions"].update(armature="9"), nothing),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_that_need_no_replay_are_found(folder, armature, lie):
    path = rewritten(folder / "weak.zip", *LIES[lie])
    done = armature("verify", path.name, "--store", "store")
    assert done.code == 1 and "code: bundle_contradicts_itself" in done.stderr, done.stderr
    assert "replaying" not in done.stdout


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("weak", solve_all, "bundle_refuted"),
        ("weak", change_action, "bundle_refuted"),
        ("served", solve_all, "bundle_refuted"),
    ],
)
def test_careful_lie_is_found_by_replay(folder, armature, name, change, code):
    path = truthful_metrics(rewritten(folder / f"{name}.zip", nothing, change))
    done = armature("verify", path.name, "--store", "store", "--episodes", str(EPISODES))
    assert done.code == 1 and f"code: {code}" in done.stderr, done.stderr + done.stdout


@pytest.mark.parametrize("exact", [True, False], ids=["same versions", "other versions"])
def test_rows_of_a_better_policy_are_refuted(folder, armature, exact):
    weak = json.loads(claims_of(folder / "weak.zip"))
    stolen = {key: weak[key] for key in ("policy", "policy_sha256")} | ({} if exact else {"versions": {}})
    path = rewritten(folder / "strong.zip", lambda claims: claims.update(stolen))
    done = armature("verify", path.name, "--store", "store", "--episodes", "1" if exact else str(EPISODES))
    assert done.code == 1 and "code: bundle_refuted" in done.stderr, done.stderr + done.stdout


def claims_of(path: Path) -> bytes:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return archive.read("bundle.json")


@pytest.mark.parametrize(
    ("claims", "rows", "options", "code"),
    [
        (nothing, lambda rows: rows[0].update(actions="%"), [], "foreign_file_unreadable"),
        (nothing, lambda rows: rows[0].update(steps="many"), [], "foreign_file_unreadable"),
        (lambda claims: claims.update(extra=1), nothing, [], "foreign_file_unreadable"),
        (
            lambda claims: claims["settings"]["evaluation"].update(episodes_per_task=10**7),
            nothing,
            [],
            "bundle_has_too_many_tasks",
        ),
        (nothing, lambda rows: rows[0].update(success="no"), [], "foreign_file_unreadable"),
        (nothing, lambda rows: rows[0].update(note="no"), [], "foreign_file_unreadable"),
        (lambda claims: claims["metrics"].update(success=10**400), nothing, [], "foreign_file_unreadable"),
        (lambda claims: claims["settings"]["simulator"].update(resolution=4096), nothing, [], "bundle_asks_too_much"),
        (lambda claims: claims["settings"]["evaluation"].update(attempts=10**400), nothing, [], "bundle_asks_too_much"),
        (nothing, nothing, ["--policy", "store/policy/strong"], "policy_differs"),
        (lambda claims: claims.update(policy="0" * 36), nothing, [], "artifact_not_in_store"),
    ],
    ids=[
        "base64",
        "text as a number",
        "unknown key",
        "many",
        "text as truth",
        "unknown column",
        "huge",
        "pixels",
        "attempts",
        "other policy",
        "policy that is not here",
    ],
)
def test_other_bundles_are_errors(folder, armature, claims, rows, options, code):
    path = rewritten(folder / "weak.zip", claims, rows)
    done = armature("verify", path.name, "--store", "store", *options)
    assert done.code == 1 and f"code: {code}" in done.stderr, done.stderr
