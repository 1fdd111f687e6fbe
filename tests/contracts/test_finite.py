"""Numbers that are not finite are refused by their names in every document that somebody else writes."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from armature import components
from armature.components.artifacts.manifest import read_manifest, write_manifest
from armature.components.contracts.metrics import read_finite
from armature.components.contracts.settings import Settings
from armature.components.robots.datasets.lerobot.layout import DatasetInfo, read_info, read_stats
from armature.components.robots.datasets.stage import augment
from armature.components.robots.policies.molmoact2.checkpoints.parts import load_parts
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from armature.components.robots.policies.norm_stats import NormStats
from tests.refusals import refused
from tests.robots.policies.molmoact2 import released

HOSTILE = {"inf": "Infinity", "minus_inf": "-Infinity", "nan": "NaN", "overflow": "1e999"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return released.write_released(tmp_path_factory.mktemp("released") / "checkpoint")


def spoil(path: Path, keys: str, number: str) -> None:
    """Replace the value at the dotted path `keys` of a JSON file by the text `number`, such as NaN."""
    document = json.loads(path.read_text())
    *parents, last = [int(key) if key.isdigit() else key for key in keys.split(".")]
    at = document
    for key in parents:
        at = at[key]
    at[last] = "HERE"
    path.write_text(json.dumps(document).replace('"HERE"', number))


def info(folder: Path) -> Path:
    path = folder / "meta/info.json"
    path.parent.mkdir()
    features = {"timestamp": {"dtype": "float32", "shape": [1]}}
    features |= {
        name: {"dtype": "int64", "shape": [1]} for name in ("frame_index", "index", "episode_index", "task_index")
    }
    counts = {"total_episodes": 1, "total_frames": 1, "total_tasks": 1}
    path.write_text(json.dumps({"codebase_version": "v3.0", "fps": 10, **counts, "features": features}))
    assert isinstance(read_info(path), DatasetInfo)
    return path


def statistics(folder: Path) -> Path:
    (folder / "meta").mkdir()
    (folder / "new").mkdir()
    for place in ("meta", "new"):
        (folder / place / "stats.json").write_text(json.dumps({"action": {"mean": [0.0, 1.0]}, "x": {"max": 1.0}}))
    return folder / "meta/stats.json"


def manifest(folder: Path) -> Path:
    nothing: dict[str, Any] = {"rows": {}, "drops": {}, "inputs": {}}
    write_manifest(folder, kind="tasks", kind_version=1, settings={"a": {"b": [0.5, 1.5]}}, **nothing)
    return folder / "manifest.json"


DOCUMENTS: dict[str, tuple[Callable[[Path], Path], str, Callable[[Path], object]]] = {
    "info": (info, "fps", read_info),
    "info_features": (info, "features.timestamp.fps", read_info),
    "stats": (statistics, "action.mean.1", read_stats),
    "stats_in_place": (statistics, "x.max", lambda path: augment(path.parents[1], path.parents[1] / "new")),
    "manifest": (manifest, "settings.a.b.1", lambda path: read_manifest(path.parent)),
}


@pytest.mark.parametrize("number", HOSTILE)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_rejects_document_with_nonfinite_number(tmp_path, name, number):
    make, keys, read = DOCUMENTS[name]
    path = make(tmp_path)
    read(path)
    spoil(path, keys, HOSTILE[number])
    with refused("manifest_unreadable" if name == "manifest" else "invalid_json", keys.split(".")[0], path):
        read(path)


CHECKPOINT_FILES = {
    "rope_theta": ("config.json", "text_config.rope_theta"),
    "flow": ("config.json", "flow_matching_beta_alpha"),
    "unknown": ("config.json", "something"),
    "image_mean": ("processor_config.json", "image_processor.image_mean.0"),
    "quantile": ("norm_stats.json", "metadata_by_tag.kitchen.action_stats.q99.2"),
    "other_tag": ("norm_stats.json", "metadata_by_tag.garden.state_stats.std.0"),
    "horizon": ("norm_stats.json", "metadata_by_tag.kitchen.action_horizon"),
}


@pytest.mark.parametrize("number", ["inf", "overflow"])
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_rejects_policy_with_nonfinite_number(checkpoint, tmp_path, name, number):
    file, keys = CHECKPOINT_FILES[name]
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    spoil(copy / file, keys, HOSTILE[number])
    with refused("invalid_json", file, *(key for key in keys.split(".") if not key.isdigit())):
        load_parts(copy, released.SETTINGS.model_copy(update={"norm_tag": "kitchen"}))


@pytest.mark.parametrize("scale", ["Infinity", "NaN", "1e999", "0", "-10"])
def test_rejects_action_tokenizer_with_invalid_scale(tmp_path, scale):
    import numpy as np

    ActionTokens.fit([np.zeros((2, 2), np.float32)], 300, 10.0).save(tmp_path)
    assert ActionTokens.load(tmp_path).scale == 10
    spoil(tmp_path / "processor_config.json", "scale", scale)
    with refused("invalid_action_tokenizer", "scale"):
        ActionTokens.load(tmp_path)


def models() -> Iterator[type[BaseModel]]:
    for module in pkgutil.walk_packages(components.__path__, "armature.components."):
        if module.name.rpartition(".")[2] in ("settings", "configuration", "layout", "norm_stats", "workload", "costs"):
            importlib.import_module(module.name)
    left = [Settings, NormStats, MolmoAct2Config, DatasetInfo]
    while left:
        model = left.pop()
        yield model
        left += model.__subclasses__()
        left += [
            part
            for each in model.model_fields.values()
            if isinstance(part := each.annotation, type) and issubclass(part, BaseModel) and part not in left
        ]


def test_settings_and_foreign_documents_need_finite_numbers():
    checked = {model for model in models() if model is not NormStats}
    assert len(checked) > 60
    assert [model for model in checked if model.model_config.get("allow_inf_nan") is not False] == []


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_finite_documents_are_read_unchanged(value):
    text = json.dumps(value)
    try:
        strict = json.dumps(value, allow_nan=False)
    except ValueError:
        with pytest.raises(ValueError) as caught:
            read_finite(text)
        assert caught.type is ValueError  # not json's own error: the text is JSON
    else:
        assert read_finite(text) == json.loads(strict)
