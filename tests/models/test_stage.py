"""The stage `model`, and references to checkpoints elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from armature.components.artifacts.manifest import read_manifest
from armature.components.configuration.stages import run_stage
from armature.components.contracts.digests import folder_digest
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.models.load import load_model, load_processor
from armature.components.models.settings import ModelSettings
from armature.components.models.source import SourceReference, locate
from armature.components.models.tiny import SMALL
from tests.builders import make_machine
from tests.refusals import refused

BASE: dict[str, Any] = {
    "dtype": "float32",
    "attn_implementation": "sdpa",
    "trust_remote_code": False,
    "freeze": (),
    "gradient_checkpointing": False,
}


@pytest.fixture
def machine(tmp_path) -> Machine:
    return make_machine(store=tmp_path / "store")


def test_tiny_model_is_reused_and_reproducible(machine, tmp_path):
    settings = ModelSettings(source="tiny/qwen2-vl", tiny=SMALL, **BASE)
    made = run_stage("model", settings, {}, machine)
    assert run_stage("model", settings, {}, machine) == made
    elsewhere = run_stage("model", settings, {}, make_machine(store=tmp_path / "other"))
    assert elsewhere.digest == made.digest == folder_digest(made.path)
    assert load_model(made.path, settings).config.model_type == "qwen2_vl"
    assert locate(made.path) == made.path


def test_folder_is_referenced_not_copied(machine, checkpoint, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in checkpoint("llava").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = ModelSettings(source=str(folder), **BASE)
    made = run_stage("model", settings, {}, machine)
    assert {file.name for file in made.path.iterdir()} == {"source.json", "manifest.json"}
    assert json.loads((made.path / "source.json").read_text())["source"] == str(folder)
    assert locate(made.path) == folder
    assert load_model(made.path, settings).config.model_type == "llava"
    assert type(load_processor(made.path, settings)).__name__ == "LlavaProcessor"
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with refused("checkpoint_changed", folder, made.path):
        load_model(made.path, settings)
    again = run_stage("model", settings, {}, machine)
    assert again.path != made.path and load_model(again.path, settings).config.model_type == "llava"
    assert run_stage("model", settings, {}, machine) == again


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("{folder}/nowhere", "checkpoint_folder_missing"),
        ("organization/model", "revision_missing"),
        ("{folder}/pickled", "safetensors_missing"),
    ],
    ids=["missing folder", "hub name without revision", "pickled weights"],
)
def test_rejects_sources_without_usable_weights(machine, tmp_path, source, code):
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/config.json").write_text('{"model_type": "llava"}')
    (tmp_path / "pickled/pytorch_model.bin").touch()
    source = source.format(folder=tmp_path)
    with refused(code, source):
        made_from(machine, source=source)


def test_rejects_unknown_tiny_family():
    with refused("value_error", "'qwen2-vl'"):
        ModelSettings(source="tiny/qwen2", tiny=SMALL, **BASE)


def made_from(machine: Machine, **settings: Any) -> Artifact:
    """Run the stage `model` with these settings and return its artifact."""
    return run_stage("model", ModelSettings(**BASE, **settings), {}, machine)


def sharded(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint, split its weights into two files with an index, and add a file that no loader reads."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "README.md").write_text("a model")
    return folder


@pytest.mark.parametrize(
    "changed",
    [
        "model-00002-of-00002.safetensors",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "processor_config.json",
    ],
)
def test_checkpoint_digest_covers_every_relevant_file(machine, checkpoint, tmp_path, changed):
    folder = sharded(checkpoint("llava"), tmp_path / "mine")
    made = made_from(machine, source=str(folder))
    (folder / "README.md").write_text("a good model")
    assert locate(made.path) == folder
    content = bytearray((folder / changed).read_bytes())
    content[-2] ^= 1
    (folder / changed).write_bytes(content)
    with refused("checkpoint_changed", folder, made.path):
        locate(made.path)


def test_rejects_index_with_file_names_outside_the_folder(machine, checkpoint, tmp_path):
    folder = sharded(checkpoint("llava"), tmp_path / "mine")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "../model-00002"))
    with refused("unsafe_file_name", index, "../model-00002"):
        made_from(machine, source=str(folder))


def test_rejects_configuration_larger_than_its_weights(machine, checkpoint, tmp_path):
    folder = sharded(checkpoint("qwen2-vl"), tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text()) | {"text_config": None}
    (folder / "config.json").write_text(json.dumps(config))
    with refused("weights_mismatch", folder):
        made_from(machine, source=str(folder))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_branch_is_resolved_to_its_commit_once(hub, machine, checkpoint, capsys):
    first = hub.add("model", "someone/small", files_of(checkpoint("llava")))
    settings = ModelSettings(source="someone/small", revision="main", **BASE)
    made = run_stage("model", settings, {}, machine)
    assert f"someone/small: main is commit {first}\n" in capsys.readouterr().out
    assert len([request for request in hub.asked if request.endswith("/revision/main")]) == 1
    pinned = settings.model_copy(update={"revision": first})
    assert run_stage("model", pinned, {}, machine) == made  # a branch and its commit give the same artifact
    assert read_manifest(made.path).settings["revision"] == first
    assert json.loads((made.path / "source.json").read_text())["commit"] == first
    assert (locate(made.path) / "config.json").read_bytes() == hub.repositories["model", "someone/small"].files(first)[
        "config.json"
    ]
    second = hub.add("model", "someone/small", files_of(checkpoint("llava")) | {"notes.txt": b"new"})
    moved = run_stage("model", settings, {}, machine)
    assert moved != made and read_manifest(moved.path).settings["revision"] == second
    assert run_stage("model", pinned, {}, machine) == made


def test_offline_run_resolves_a_branch_from_the_cache(hub, machine, checkpoint, capsys, monkeypatch):
    commit = hub.add("model", "someone/small", files_of(checkpoint("llava")))
    settings = ModelSettings(source="someone/small", revision="main", **BASE)
    made = run_stage("model", settings, {}, machine)
    capsys.readouterr()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run_stage("model", settings, {}, machine) == made
    assert f"main is commit {commit}, as the local cache has it: the hub cannot be reached" in capsys.readouterr().out
    with refused("repository_unavailable", "someone/small at v2"):
        run_stage("model", settings.model_copy(update={"revision": "v2"}), {}, machine)


def test_rejects_revision_missing_on_the_hub(hub, machine):
    hub.add("model", "someone/small", {"config.json": b"{}"})
    for name, revision in (("someone/small", "v3"), ("someone/other", "main")):
        with refused("repository_unavailable", "404", f"{name} at {revision}"):
            made_from(machine, source=name, revision=revision)


@pytest.mark.parametrize("content", ["{}", "[", b"\xff\xfe", "to itself", "sparse"])
def test_rejects_damaged_and_circular_references(content, tmp_path):
    reference = SourceReference(source=str(tmp_path), revision=None, commit=None, checkpoint_sha256="0")
    if content == "to itself":
        reference.write(tmp_path)
    else:
        (tmp_path / "source.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    if content == "sparse":
        os.truncate(tmp_path / "source.json", 2**40)
    with refused("file_too_large" if content == "sparse" else "foreign_file_unreadable", "source.json"):
        locate(tmp_path)
