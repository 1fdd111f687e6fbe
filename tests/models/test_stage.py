"""The stage `model`, and references to weights that lie elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.artifacts.digests import folder_digest
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.machine import Machine
from components.models.load import load_model, load_processor
from components.models.settings import ModelSettings
from components.models.source import locate
from components.models.tiny import SMALL
from components.stages import run_stage

BASE: dict[str, Any] = {
    "dtype": "float32",
    "attn_implementation": "sdpa",
    "trust_remote_code": False,
    "freeze": (),
    "gradient_checkpointing": False,
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(store=str(tmp_path / "store"))


def test_a_tiny_model_is_made_once_and_anew_with_the_same_digest(machine: Machine, tmp_path: Path) -> None:
    settings = ModelSettings(source="tiny/qwen2-vl", tiny=SMALL, **BASE)
    made = run_stage("model", settings, {}, machine)
    assert run_stage("model", settings, {}, machine) == made
    elsewhere = run_stage("model", settings, {}, Machine(store=str(tmp_path / "other")))
    assert elsewhere.digest == made.digest == folder_digest(made.path)
    assert load_model(made.path, settings).config.model_type == "qwen2_vl"
    assert locate(made.path) == made.path


def test_a_folder_is_referred_to_not_copied(
    machine: Machine, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
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
    with pytest.raises(DataError, match="not those that the artifact refers to"):
        load_model(made.path, settings)


def test_a_missing_folder_is_named(machine: Machine, tmp_path: Path) -> None:
    settings = ModelSettings(source=str(tmp_path / "nowhere"), **BASE)
    with pytest.raises(DataError, match="nowhere"):
        run_stage("model", settings, {}, machine)


def test_a_hub_name_without_a_revision_is_refused(machine: Machine) -> None:
    with pytest.raises(ConfigurationError, match="needs a revision"):
        run_stage("model", ModelSettings(source="organisation/model", **BASE), {}, machine)


def test_a_folder_of_pickled_weights_is_refused(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"model_type": "llava"}')
    (tmp_path / "old" / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match="no safetensors"):
        run_stage("model", ModelSettings(source=str(tmp_path / "old"), **BASE), {}, machine)


def test_an_unknown_tiny_family_is_refused(machine: Machine) -> None:
    with pytest.raises(ConfigurationError, match="did you mean"):
        run_stage("model", ModelSettings(source="tiny/qwen2", tiny=SMALL, **BASE), {}, machine)
