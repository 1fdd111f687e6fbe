"""Checkpoints in the released layout: reading is strict, and writing reproduces their bytes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from armature.components.contracts.robots import RobotObservation
from armature.components.models.load import MappedWeights
from armature.components.robots.policies.family import load_model
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import (
    load_policy,
    read_model,
    save_policy,
)
from armature.components.robots.policies.molmoact2.checkpoints.parts import load_parts
from armature.components.robots.policies.molmoact2.checkpoints.weights import to_released
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from armature.components.robots.policies.norm_stats import RobotMetadata
from tests.refusals import refused
from tests.robots.policies.molmoact2 import released

OBSERVATION = RobotObservation(
    images={camera: np.full((30, 40, 3), 60 * n, np.uint8) for n, camera in enumerate(released.CAMERAS, start=1)},
    state=np.linspace(-1, 1, 8, dtype=np.float32),
    task="Put the bowl away.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released.write_released(tmp_path_factory.mktemp("released") / "checkpoint")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_released_tensors_load_into_the_right_parameters(folder: Path) -> None:
    state, file = load_policy(folder, released.SETTINGS).model.state_dict(), load_file(folder / "model.safetensors")
    layer, block = "vlm.model.language_model.layers.1", "model.transformer.blocks.1"
    queries, keys, values = file[f"{block}.self_attn.att_proj.weight"].split([24, 12, 12])
    up, gate = file[f"{block}.mlp.ff_proj.weight"].chunk(2)
    vit = "model.vision_backbone.image_vit.transformer.resblocks.2"
    assert torch.equal(state[f"{layer}.self_attn.q_proj.weight"], queries)
    assert torch.equal(state[f"{layer}.self_attn.k_proj.weight"], keys)
    assert torch.equal(state[f"{layer}.self_attn.v_proj.weight"], values)
    assert torch.equal(state[f"{layer}.mlp.up_proj.weight"], up)
    assert torch.equal(state[f"{layer}.mlp.gate_proj.weight"], gate)
    assert torch.equal(state["vlm.model.vision_tower.layers.2.mlp.fc2.bias"], file[f"{vit}.feed_forward.w2.bias"])
    assert torch.equal(state["vlm.lm_head.weight"], file["lm_head.weight"])
    expert = {name.removeprefix("model.") for name in file if name.startswith("model.action_expert.")}
    assert expert == {name for name in state if name.startswith("action_expert.")}
    assert all(torch.equal(state[name], file[f"model.{name}"]) for name in expert)
    assert sum(one.numel() for one in state.values()) == sum(one.numel() for one in file.values()) - 3  # frequencies


def test_written_checkpoint_equals_the_one_read(folder: Path, tmp_path: Path) -> None:
    loaded = load_policy(folder, released.SETTINGS)
    saved = save_policy(tmp_path / "saved", loaded.parts, loaded.model.state_dict())
    assert same_bits(load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors"))
    for name in ("config.json", "norm_stats.json"):
        assert json.loads((saved / name).read_text()) == json.loads((folder / name).read_text()), name
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
        assert (saved / name).read_bytes() == (folder / name).read_bytes(), name
    assert not list(saved.glob("*.py"))


def test_reads_and_writes_shards_with_an_index(folder: Path, tmp_path: Path) -> None:
    sharded = released.write_released(tmp_path / "sharded", shards=3)
    one, many = load_policy(folder, released.SETTINGS), load_policy(sharded, released.SETTINGS)
    assert same_bits(dict(one.model.state_dict()), dict(many.model.state_dict()))
    saved = save_policy(tmp_path / "saved", many.parts, many.model.state_dict(), shard_bytes=10_000)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    shards = sorted(saved.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert max(shard.stat().st_size for shard in shards if len(load_file(shard)) > 1) < 20_000
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert same_bits(tensors, load_file(folder / "model.safetensors"))
    assert {name: load_file(saved / file)[name].shape for name, file in index["weight_map"].items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert same_bits(dict(load_model(saved, many.parts).state_dict()), dict(one.model.state_dict()))


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.action_expert.action_embed.bias"]


def set_to(name: str, change: Callable[[Tensor | None], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors.get(name))})


GATE, EMBEDDING = "model.action_expert_depth_gate.weight", "model.transformer.wte.new_embedding"
WIDER = torch.zeros(released.EXTRA + 1, released.HIDDEN)
FREQUENCIES = "model.transformer.rotary_emb.inv_freq"


@pytest.mark.parametrize(
    ("change", "code", "shown"),
    [
        pytest.param(drop, "weights_mismatch", "action_expert.action_embed.bias", id="missing"),
        pytest.param(set_to(GATE, lambda _: torch.zeros(1)), "weights_mismatch", GATE[6:], id="unknown"),
        pytest.param(set_to(EMBEDDING, lambda _: WIDER), "weights_mismatch", (17, 16), id="shape"),
        pytest.param(set_to(FREQUENCIES, lambda old: old / 2), "rope_theta_mismatch", "rope_theta", id="frequencies"),  # type: ignore[operator]
    ],
)
def test_rejects_weights_that_do_not_fit_the_configuration(
    copy: Path, change: Callable[[dict[str, Tensor]], None], code: str, shown: object
) -> None:
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    with refused(code, shown):
        load_policy(copy, released.SETTINGS)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return released.write_released(tmp_path / "sharded", shards=2)


def move(sharded: Path, file: object) -> Path:
    """Change the checkpoint's index such that it claims that the output head is in `file`."""
    path = sharded / "model.safetensors.index.json"
    released.write(path, {"weight_map": json.loads(path.read_text())["weight_map"] | {"lm_head.weight": file}})
    return path


def test_rejects_index_that_disagrees_with_its_shards(sharded: Path) -> None:
    parts = load_parts(sharded, released.SETTINGS)
    names = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(name for name in names.values() if name != names["lm_head.weight"])
    move(sharded, other)
    with refused("weights_mismatch", sharded, "lm_head.weight"):
        load_model(sharded, parts)
    (sharded / other).unlink()
    with refused("safetensors_unreadable", sharded / other):
        load_model(sharded, parts)


OUTSIDE = (
    "../norm_stats.json",
    "/tmp/stats.json",
    "a/../../stats.json",
    "sub/stats.json",
    "..\\stats.json",
    "C:x",
    "",
    ".",
)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        *(("unsafe_file_name", name) for name in OUTSIDE),
        *(("invalid_policy_config", name) for name in (7, None)),
        ("invalid_statistics_name", "config.json"),
    ],
)
def test_rejects_statistics_file_outside_the_checkpoint(copy: Path, code: str, name: object) -> None:
    config = json.loads((copy / "config.json").read_text())
    released.write(copy / "config.json", config | {"norm_stats_filename": name})
    with refused(code, copy / "config.json", "norm_stats_filename"):
        load_parts(copy, released.SETTINGS)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/hostname", "sub/model.safetensors", 3])
def test_rejects_shard_in_another_folder(sharded: Path, name: object) -> None:
    parts = load_parts(sharded, released.SETTINGS)
    shutil.copy(next(sharded.glob("*.safetensors")), sharded.parent / "other.safetensors")
    with refused("unsafe_file_name", move(sharded, name)):
        load_model(sharded, parts)


def test_bfloat16_keeps_expert_and_norms_in_float32(folder: Path) -> None:
    settings = released.SETTINGS.model_copy(update={"dtype": "bfloat16"})
    state, file = load_policy(folder, settings).model.state_dict(), load_file(folder / "model.safetensors")
    norm = file["model.transformer.blocks.0.attn_norm.weight"]
    assert torch.equal(state["vlm.model.language_model.layers.0.input_layernorm.weight"], norm)
    assert torch.equal(state["vlm.lm_head.weight"], file["lm_head.weight"].bfloat16())
    expert = [name for name in state if name.startswith("action_expert.")]
    assert all(torch.equal(state[name], file[f"model.{name}"]) for name in expert)
    model, stored = read_model(folder, load_parts(folder, settings))
    assert same_bits(dict(MappedWeights(model, stored)), dict(state))
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in model.parameters())


def test_released_size_has_published_number_of_parameters() -> None:
    raw: dict[str, Any] = released.config() | {"max_action_dim": 32, "max_action_horizon": 30}
    raw["vit_config"] = {"image_num_pos": 729}
    raw["adapter_config"] = {"pooling_attention_mask": True, "intermediate_size": 9728, "text_hidden_size": 2560}
    raw["text_config"] |= {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    raw["text_config"] |= {"vocab_size": 154_624, "additional_vocab_size": 128, "intermediate_size": 9728}
    raw["text_config"] |= {"num_hidden_layers": 36}
    raw["action_expert_config"] = {"hidden_size": 768, "num_layers": 36, "num_heads": 8, "mlp_ratio": 4.0}
    config = MolmoAct2Config.from_dict(raw)
    with torch.device("meta"):
        tensors = to_released(MolmoAct2(config).state_dict(), config.molmo2())
    assert len(tensors) + 1 == 1295  # and the rotary frequencies
    assert sum(tensor.numel() for tensor in tensors.values()) == 5_442_196_208
    expert = (tensor.numel() for name, tensor in tensors.items() if name.startswith("model.action_expert."))
    assert sum(expert) == 577_564_448


def test_norm_tag_sets_horizon_words_cameras_and_statistics(folder: Path) -> None:
    loaded = load_policy(folder, released.KITCHEN)
    settings, processor = loaded.settings, loaded.processor()
    assert (settings.chunk_size, settings.n_action_steps) == (4, 3)
    assert settings.setup_type == "single arm in a kitchen"
    assert processor.cameras == released.CAMERAS
    low, high = (np.array(released.statistics(7, seed=1)[name]) for name in ("q01", "q99"))
    answer = processor.decode(np.full((4, released.DIMENSIONS), 0.5))
    np.testing.assert_allclose(answer, np.tile(low + 0.75 * (high - low), (4, 1)), rtol=1e-6)
    prompt = released.tokenizer().decode(processor.encode(OBSERVATION).input_ids.tolist(), skip_special_tokens=False)
    assert "The setup is <setup_start>single arm in a kitchen<setup_end>." in prompt
    changed = released.KITCHEN.model_copy(update={"setup_type": "mine", "image_keys": released.CAMERAS[1:]})
    assert load_parts(folder, changed).settings.setup_type == "mine"
    assert load_parts(folder, changed).processor().cameras == released.CAMERAS[1:]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "processor_config.json"])
def test_rejects_checkpoint_with_a_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with refused("checkpoint_file_missing", name):
        load_parts(copy, released.SETTINGS)


def test_rejects_missing_settings_tag_or_statistics(folder: Path) -> None:
    with refused("policy_settings_missing", folder):
        load_parts(folder)
    with refused("unknown_norm_tag", "'cellar'", "garden, kitchen"):
        load_parts(folder, released.SETTINGS.model_copy(update={"norm_tag": "cellar"}))
    with refused("normalization_statistics_missing", folder):
        load_parts(folder, released.SETTINGS).processor()


@pytest.mark.parametrize("feature", ["action_stats", "state_stats"])
def test_rejects_action_statistics_that_cannot_be_inverted(copy: Path, feature: str) -> None:
    """Dimension 3 has q99 = q01. As a state it is only an input, so the released normalization is kept."""
    stats = json.loads((copy / "norm_stats.json").read_text())
    entry = stats["metadata_by_tag"]["kitchen"][feature]
    entry["q99"][3] = entry["q01"][3]
    released.write(copy / "norm_stats.json", stats)
    parts = load_parts(copy, released.KITCHEN)
    if feature == "state_stats":
        assert parts.processor().state.normalize(np.full(8, 9.0))[3] == 1
        return
    with refused("unusable_statistics", "'joint_3'"):
        parts.processor()


@pytest.mark.parametrize(
    ("semantics", "tag", "dataset_wins"),
    [("head", None, True), ("head", "kitchen", False), ("seed", "kitchen", True)],
    ids=["no tag", "head", "seed"],
)
def test_training_uses_statistics_of_tag_or_dataset_by_semantics(
    folder: Path, semantics: str, tag: str | None, dataset_wins: bool
) -> None:
    raw = released.norm_stats()["metadata_by_tag"]["kitchen"] | {"action_stats": released.statistics(7, seed=9)}
    dataset = RobotMetadata.model_validate(raw)
    settings = released.SETTINGS.model_copy(update={"norm_tag": tag, "semantics": semantics})
    parts = load_parts(folder, settings, dataset)
    assert parts.robot is not None
    assert (parts.robot.action_stats == dataset.action_stats) is dataset_wins


def test_saved_checkpoint_is_self_contained(folder: Path, tmp_path: Path) -> None:
    gone = shutil.copytree(folder, tmp_path / "gone")
    tokens = ActionTokens.fit([np.zeros((4, 7), np.float32)], vocabulary=released.ACTIONS, scale=10.0)
    settings = released.KITCHEN.model_copy(update={"action_mode": "both", "action_normalization": "mean_std"})
    loaded = load_policy(gone, settings)
    parts = dataclasses.replace(loaded.parts, action_tokens=tokens)
    saved = save_policy(tmp_path / "run" / "checkpoint", parts, loaded.model.state_dict())
    before = parts.processor().encode(OBSERVATION, np.full((4, 7), 0.3))
    shutil.rmtree(gone)
    again = load_policy(saved.parent)  # load the artifact around the checkpoint, without settings
    after = again.processor().encode(OBSERVATION, np.full((4, 7), 0.3))
    assert all(np.array_equal(getattr(before, name), value) for name, value in vars(after).items())
    assert again.settings.checkpoint_path is None
    assert again.settings.model_copy(update={"checkpoint_path": "given/elsewhere"}) == parts.settings


def test_dataset_statistics_are_saved_under_the_tag_trained(folder: Path, tmp_path: Path) -> None:
    robot = RobotMetadata.model_validate(released.norm_stats()["metadata_by_tag"]["garden"])
    loaded = load_policy(folder, released.SETTINGS, robot)
    saved = save_policy(tmp_path / "saved", loaded.parts, loaded.model.state_dict())
    tags = json.loads((saved / "norm_stats.json").read_text())["metadata_by_tag"]
    assert set(tags) == {"kitchen", "garden", "trained"}
    assert tags["trained"]["action_horizon"] == released.HORIZON  # the trained horizon, not the entry's
    assert load_parts(saved).robot == robot.model_copy(
        update={"action_horizon": released.HORIZON, "n_action_steps": released.HORIZON}
    )


def test_chunk_longer_than_the_horizon_extends_the_configuration(folder: Path, tmp_path: Path) -> None:
    settings = released.SETTINGS.model_copy(update={"chunk_size": 2 * released.HORIZON})
    loaded = load_policy(folder, settings)
    saved = save_policy(tmp_path / "saved", loaded.parts, loaded.model.state_dict())
    assert json.loads((saved / "config.json").read_text())["max_action_horizon"] == 2 * released.HORIZON


def test_failed_save_keeps_the_previous_checkpoint(folder: Path, tmp_path: Path) -> None:
    loaded = load_policy(folder, released.SETTINGS)
    state = loaded.model.state_dict()
    saved = save_policy(tmp_path / "saved", loaded.parts, state)
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with refused("weights_layout_mismatch"):
        save_policy(saved, loaded.parts, {name: one for name, one in state.items() if "k_proj" not in name})
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
