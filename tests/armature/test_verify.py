"""`armature bundle` and `armature verify` with a scripted policy: only honest bundles pass."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from armature.bundle_checks import named_code
from armature.verify import bundle_evaluation
from tests.builders import make_machine
from tests.evaluation.bundles import EPISODES, ScriptedPool, evaluate, rewritten, write_policy


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr("armature.components.inference.pool.ServerPool", ScriptedPool)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with the bundle of an honest evaluation, and a store with its policy and a stronger one."""
    folder = tmp_path_factory.mktemp("made")
    machine = make_machine(store=folder / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("armature.components.inference.pool.ServerPool", ScriptedPool)
        evaluation = evaluate(machine, write_policy(folder / "store", "weak", 0.3))
        write_policy(folder / "store", "strong", 1.0)
        bundle_evaluation(evaluation.digest[:12], folder / "honest.zip", machine)
    return folder


@pytest.fixture
def bundle(tmp_path, made) -> Path:
    """A copy of the bundle in the folder in which the command runs, which also has the store."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "honest.zip"


def test_honest_bundle_is_equal_bit_for_bit(bundle, armature):
    for more in ([], ["--seed", "5"], ["--policy", "store/model/weak"], ["--episodes", str(EPISODES)]):
        done = armature("verify", bundle.name, "--store", "store", *more)
        assert done.code == 0 and "equal bit for bit: " in done.stdout, done.stderr
    assert f"{EPISODES} of {EPISODES}" in done.stdout


def solve_all(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["result"] |= {"solved": True, "reward": 1.0, "reward_parts": {"correct": 1.0, "format": 1.0}}


def drop_losses(rows: list[dict[str, Any]]) -> None:
    rows[:] = [row for row in rows if row["result"]["solved"]]


def reseed(rows: list[dict[str, Any]]) -> None:
    rows[3]["seed"] += 1


def flip_one(rows: list[dict[str, Any]]) -> None:
    rows[0]["result"]["solved"] = not rows[0]["result"]["solved"]


def with_metrics_of_rows(path: Path) -> Path:
    """Make the summary agree with the rows of a bundle, as a careful liar does."""
    from armature.components.evaluation.bundle import read_bundle
    from armature.components.evaluation.results import metrics

    numbers = metrics([each.result for each in read_bundle(path).episodes], ["heldout"])
    return rewritten(path.rename(path.with_name("draft.zip")), lambda claims: claims.update(metrics=numbers))


LIES = {
    "rate": (lambda claims: claims["metrics"].update(accuracy=0.99), None, "bundle_contradicts_itself"),
    "one row, summary": (None, flip_one, "bundle_contradicts_itself"),
    "all rows, sample": (None, solve_all, "bundle_contradicts_itself"),
    "losses left out": (None, drop_losses, "bundle_contradicts_itself"),
    "seeds": (None, reseed, "bundle_contradicts_itself"),
    "seed": (lambda claims: claims["settings"]["evaluation"].update(seed=7), None, "bundle_contradicts_itself"),
    "versions": (lambda claims: claims["versions"].update(armature="9"), None, "bundle_contradicts_itself"),
    "tasks": (lambda claims: claims["tasks"].update(heldout="0" * 64), None, "bundle_contradicts_itself"),
    "environment": (lambda claims: claims["environment"].update(seed=1), None, "bundle_contradicts_itself"),
    "policy": (lambda claims: claims.update(policy_sha256="0" * 64), None, "policy_differs"),
    "policy that is not here": (lambda claims: claims.update(policy="0" * 36), None, "artifact_not_in_store"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_that_need_no_replay_are_found(bundle, armature, lie):
    claims, rows, code = LIES[lie]
    nothing = lambda document: None  # noqa: E731
    path = rewritten(bundle, claims or nothing, rows or nothing)
    done = armature("verify", path.name, "--store", "store")
    assert done.code == 1 and f"code: {code}" in done.stderr, done.stderr
    assert "replaying" not in done.stdout


@pytest.mark.parametrize("exact", [True, False], ids=["same versions", "other versions"])
def test_rows_of_a_better_policy_are_refuted(tmp_path, bundle, armature, exact):
    machine = make_machine(store=tmp_path / "store")
    better = evaluate(machine, write_policy(tmp_path / "store", "strong", 1.0))
    assert armature("bundle", str(better.path), "--out", "better.zip", "--store", "store").code == 0
    with zipfile.ZipFile(bundle) as archive:
        honest = json.loads(archive.read("bundle.json"))
    stolen = {key: honest[key] for key in ("policy", "policy_sha256")} | ({} if exact else {"versions": {}})
    path = rewritten(
        tmp_path / "better.zip", lambda claims: claims.update(stolen, **({} if exact else {"versions": {}}))
    )
    done = armature("verify", path.name, "--store", "store", "--episodes", "1" if exact else str(EPISODES))
    assert done.code == 1 and "code: bundle_refuted" in done.stderr, done.stderr + done.stdout


def test_careful_lie_about_all_rows_is_found_by_one_replay(bundle, armature):
    def lie(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if not row["result"]["solved"]:
                row["result"] |= {"solved": True, "reward": 1.0, "reward_parts": {"correct": 1.0, "format": 1.0}}
            row["logprobs"] = "0" * 64

    path = with_metrics_of_rows(rewritten(bundle, lambda claims: None, lie))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(path.with_name("last.zip"), "w") as last:
        for name in archive.namelist():
            last.writestr(name, b"" if name == "rollouts.jsonl" else archive.read(name))
    done = armature("verify", "last.zip", "--store", "store", "--episodes", "1")
    assert done.code == 1 and "code: bundle_refuted" in done.stderr, done.stderr


def test_other_versions_are_compared_by_their_outcomes(bundle, armature, monkeypatch):
    path = rewritten(bundle, lambda claims: claims.update(versions={}))
    done = armature("verify", path.name, "--store", "store")
    assert done.code == 0 and "consistent with the claim" in done.stdout
    monkeypatch.setattr(ScriptedPool, "promised", False)
    done = armature("verify", bundle.name, "--store", "store")
    assert done.code == 0 and "consistent with the claim" in done.stdout


NAMES = {
    "class": ({"name": "own:Class", "args": {}}, ["own:Class"]),
    "openenv": ({"name": "openenv", "args": {"command": ["rm", "-rf", "/"]}}, ["openenv"]),
    "gymnasium": ({"name": "gymnasium", "args": {"id": "x", "modules": ["antigravity"]}}, ["gymnasium"]),
    "program": ({"name": "program", "args": {"command": ["rm", "-rf", "/"]}}, ["program"]),
    "unknown": ({"name": "nobody-has-this", "args": {}}, ["nobody-has-this"]),
    "tool": ({"name": "colors", "args": {}, "tools": ["zoom", "os:system"]}, ["os:system"]),
    "reward": ({"name": "dataset", "args": {"reward": "own:f"}}, ["dataset", "own:f"]),
    "in evaluation": ({"name": "colors", "args": {}, "evaluation_args": {"x": [{"y": "a.b:c"}]}}, ["a.b:c"]),
    "mixture": ({"name": "mixture", "args": {"parts": {"a": {"name": "program", "args": {}}}}}, ["mixture", "program"]),
    "generated": ({"name": "colors", "args": {"question": "Which: red or blue?"}}, []),
}


@pytest.mark.parametrize("kind", NAMES)
def test_code_is_run_only_if_it_is_named(bundle, armature, kind):
    environment, names = NAMES[kind]
    assert sorted(named_code(environment)) == sorted(names)
    if names:
        path = rewritten(bundle, lambda claims: claims.update(environment=environment))
        done = armature("verify", path.name, "--store", "store", "--allow", "other")
        assert done.code == 2 and "code: bundle_names_code" in done.stderr, done.stderr
        assert all(f"--allow {name!a}" in done.stderr for name in names)


def hostile(path: Path, kind: str) -> Path:
    """Write a file that is not a valid bundle."""
    target = path.with_name("hostile.zip")
    if kind in ("empty", "text"):
        target.write_bytes(b"" if kind == "empty" else b"PK\x03\x04 not a zip")
        return target
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    many = files["bundle.json"].replace(b'"heldout_tasks": 40', b'"heldout_tasks": 4000000')
    files |= {
        "no claims": {"bundle.json": b""},
        "unknown key": {"bundle.json": files["bundle.json"].replace(b'"policy":', b'"extra": 1, "policy":')},
        "not finite": {"bundle.json": files["bundle.json"].replace(b'"metrics": {', b'"metrics": {"x": 1e999,')},
        "no id": {"episodes.jsonl": files["episodes.jsonl"].replace(b"000000-0003-00", b"../../etc")},
        "text as a number": {"episodes.jsonl": files["episodes.jsonl"].replace(b'"turns":1', b'"turns":"many"')},
        "too large": {"episodes.jsonl": b" " * 3000},
        "nested": {"rollouts.jsonl": b"[" * 100_000},
        "settings": {"bundle.json": files["bundle.json"].replace(b'"max_tokens": 8', b'"max_tokens": -8')},
        "huge number": {"episodes.jsonl": files["episodes.jsonl"].replace(b'"turns":1', b'"turns":1' + b"0" * 400)},
        "many tasks": {"bundle.json": many},
    }[kind]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("empty", "foreign_file_unreadable"),
        ("text", "foreign_file_unreadable"),
        ("no claims", "foreign_file_unreadable"),
        ("unknown key", "foreign_file_unreadable"),
        ("not finite", "foreign_file_unreadable"),
        ("no id", "foreign_file_unreadable"),
        ("text as a number", "foreign_file_unreadable"),
        ("too large", "bundle_too_large"),
        ("nested", "foreign_file_unreadable"),
        ("settings", "foreign_file_unreadable"),
        ("huge number", "foreign_file_unreadable"),
        ("many tasks", "bundle_has_too_many_tasks"),
    ],
)
def test_hostile_bundles_are_errors(bundle, armature, monkeypatch, kind, code):
    path = hostile(bundle, kind)
    if kind == "too large":
        monkeypatch.setattr("armature.components.evaluation.archive.MAX_FILE_BYTES", 2999)
    before = sorted(bundle.parent.rglob("*"))
    done = armature("verify", path.name, "--store", "store")
    assert done.code == 1 and f"code: {code}" in done.stderr, done.stderr
    assert sorted(bundle.parent.rglob("*")) == before


def test_only_evaluations_have_bundles(bundle, armature):
    assert "code: not_an_evaluation" in armature("bundle", "store/model/weak", "--store", "store").stderr
    assert "code: artifact_not_in_store" in armature("bundle", "123456789", "--store", "store").stderr
