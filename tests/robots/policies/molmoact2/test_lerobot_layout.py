"""Checkpoints in LeRobot's layout: full weights, adapters, and written by us; built from the format's description."""

from __future__ import annotations

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

from armature.cli import app
from armature.components.contracts.errors import DataError
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy, save_lerobot, save_policy
from armature.components.robots.policies.molmoact2.checkpoints.parts import load_parts
from tests.refusals import refused
from tests.robots.policies.molmoact2 import released

RANK, ALPHA = 3, 12
ADAPTED = (
    "model.transformer.blocks.1.self_attn.att_proj",
    "model.transformer.blocks.0.mlp.ff_proj",
    "model.vision_backbone.image_vit.patch_embedding",
    "lm_head",
)
STATISTICS = {"action": released.statistics(7, seed=1), "observation.state": released.statistics(8, seed=2)}
SETTINGS = released.SETTINGS.model_copy(
    update={"checkpoint_path": None, "normalize_gripper": False, "state_normalization": "identity"}
)


def policy_config(base: str) -> dict[str, Any]:
    camera = {"type": "VISUAL", "shape": [3, 64, 64]}
    state = {"type": "STATE", "shape": [8]}
    features = {
        "input_features": dict.fromkeys(released.CAMERAS, camera) | {"observation.state": state},
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "MEAN_STD"},
        "dataset_feature_names": {"action": STATISTICS["action"]["names"]},
    }
    prompts = {"setup_type": "", "control_mode": "", "image_keys": [], "normalize_language": False}
    prompts |= {"add_setup_tokens": True, "add_control_tokens": False}
    actions = {"chunk_size": 4, "n_action_steps": 2, "action_mode": "continuous", "normalize_gripper": True}
    frame = {"joint_signs": None, "joint_offsets": None}
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA}
    source = {"checkpoint_path": base, "checkpoint_revision": None, "device": "cuda", "n_obs_steps": 1}
    return {"type": "molmoact2", **source, **features, **prompts, **actions, **frame, **lora}


def write_processors(folder: Path) -> None:
    tensors = {
        f"{key}.{name}": torch.tensor(value, dtype=torch.float32).reshape(-1)
        for key, stats in STATISTICS.items()
        for name, value in stats.items()
        if name != "names"
    }
    state = "policy_preprocessor_step_3_molmoact2_masked_normalizer.safetensors"
    save_file(tensors, folder / state)
    packed = {"image_keys": list(released.CAMERAS), "setup_type": "an arm", "control_mode": "joint pose"}
    steps = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "molmoact2_state_frame_transform", "config": {"joint_signs": None, "joint_offsets": None}},
        {"registry_name": "molmoact2_masked_normalizer", "config": {"eps": 1e-8}, "state_file": state},
        {"registry_name": "molmoact2_clamp_normalized", "config": {"normalization_masks": {}}},
        {"registry_name": "molmoact2_pack_inputs", "config": packed},
        {"registry_name": "device_processor", "config": {"device": "cuda"}},
    ]
    released.write(folder / "policy_preprocessor.json", {"name": "policy_preprocessor", "steps": steps})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released checkpoint that LeRobot trained from; its weights differ from the weights that LeRobot saved."""
    return released.write_released(tmp_path_factory.mktemp("base") / "checkpoint", seed=7)


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return write_lerobot(tmp_path / "pretrained_model", base, released.weights(seed=1))


def write_lerobot(folder: Path, base: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    released.write(folder / "config.json", policy_config(str(base)))
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    write_processors(folder)
    return folder


def adapted(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights with adapters on some layers, under PEFT's names; and the merged weights in float64."""
    generator = torch.Generator().manual_seed(5)
    stored, merged = {}, dict(tensors)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight").removesuffix(".bias")
        place = name.replace(layer, f"{layer}.base_layer") if layer in ADAPTED else name
        stored[f"base_model.model.{place}"] = tensor
    for layer in ADAPTED:
        weight = tensors[f"{layer}.weight"]
        down = torch.randn(RANK, weight.shape[1], generator=generator)
        up = torch.randn(weight.shape[0], RANK, generator=generator)
        stored[f"base_model.model.{layer}.lora_A.default.weight"] = down
        stored[f"base_model.model.{layer}.lora_B.default.weight"] = up
        merged[f"{layer}.weight"] = weight.double() + ALPHA / RANK * up.double() @ down.double()
    return stored, merged


def test_weights_come_from_lerobot_and_other_files_from_the_base(folder: Path, base: Path, tmp_path: Path) -> None:
    released.write_released(tmp_path / "same", seed=1)
    loaded, same = load_policy(folder, SETTINGS), load_policy(tmp_path / "same", released.SETTINGS)
    state, expected = loaded.model.state_dict(), same.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert loaded.parts.files == base


def test_saved_processor_sets_prompt_and_normalization(folder: Path) -> None:
    parts = load_parts(folder, SETTINGS)
    settings, processor = parts.settings, parts.processor()
    assert (settings.chunk_size, settings.n_action_steps) == (4, 2)
    assert (settings.setup_type, settings.control_mode) == ("an arm", "joint pose")
    flags = (settings.normalize_language, settings.add_control_tokens, settings.normalize_gripper)
    assert flags == (False, False, True)
    assert (settings.state_normalization, settings.action_normalization) == ("quantiles", "mean_std")
    assert processor.cameras == released.CAMERAS
    mean, std = (np.array(STATISTICS["action"][name]) for name in ("mean", "std"))
    answer = processor.decode(np.full((4, released.DIMENSIONS), 0.5))
    np.testing.assert_allclose(answer[0], mean + 0.5 * std, rtol=1e-6)
    assert parts.robot is not None
    assert parts.robot.action_stats.names == tuple(STATISTICS["action"]["names"])


def test_settings_override_words_and_cameras_of_the_checkpoint(folder: Path) -> None:
    changed = SETTINGS.model_copy(update={"setup_type": "mine", "image_keys": released.CAMERAS[:1]})
    settings = load_parts(folder, changed).settings
    assert (settings.setup_type, settings.image_keys) == ("mine", released.CAMERAS[:1])


def test_adapters_are_merged_when_read(base: Path, tmp_path: Path) -> None:
    stored, merged = adapted(released.weights(seed=1))
    loaded = load_policy(write_lerobot(tmp_path / "lora", base, stored), SETTINGS)
    state = loaded.model.state_dict()
    queries, keys, values = merged[f"{ADAPTED[0]}.weight"].split([24, 12, 12])
    up, gate = merged[f"{ADAPTED[1]}.weight"].chunk(2)
    for name, expected in {
        "model.language_model.layers.1.self_attn.q_proj": queries,
        "model.language_model.layers.1.self_attn.k_proj": keys,
        "model.language_model.layers.1.self_attn.v_proj": values,
        "model.language_model.layers.0.mlp.up_proj": up,
        "model.language_model.layers.0.mlp.gate_proj": gate,
        "model.vision_tower.patch_embedding": merged[f"{ADAPTED[2]}.weight"],
        "lm_head": merged["lm_head.weight"],
    }.items():
        torch.testing.assert_close(state[f"vlm.{name}.weight"].double(), expected, rtol=1e-6, atol=1e-6)
    untouched = "vlm.model.language_model.layers.0.self_attn.q_proj.weight"
    whole = released.weights(seed=1)["model.transformer.blocks.0.self_attn.att_proj.weight"]
    assert torch.equal(state[untouched], whole[:24])
    bias = released.weights(seed=1)["model.vision_backbone.image_vit.patch_embedding.bias"]
    assert torch.equal(state["vlm.model.vision_tower.patch_embedding.bias"], bias)


def test_merging_equals_peft(base: Path, tmp_path: Path) -> None:
    """PEFT is the reference for names, scale and orientation of an adapter."""
    from peft import LoraConfig, get_peft_model

    class Body(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(released.HIDDEN, released.VOCABULARY, bias=False)

    tensors = released.weights(seed=1)
    body = Body()
    body.load_state_dict({"lm_head.weight": tensors["lm_head.weight"]})
    wrapped = get_peft_model(body, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["lm_head"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    stored = {f"base_model.model.{name}": tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    folder = write_lerobot(tmp_path / "lora", base, stored | dict(wrapped.state_dict()))
    state = load_policy(folder, SETTINGS).model.state_dict()
    merged = wrapped.merge_and_unload().lm_head.weight
    torch.testing.assert_close(state["vlm.lm_head.weight"], merged, rtol=0, atol=1e-6)


def test_saved_lerobot_checkpoint_is_byte_equal_and_self_contained(folder: Path, base: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(base, mine)
    released.write(folder / "config.json", policy_config(str(mine)))
    loaded = load_policy(folder, SETTINGS)
    saved = save_lerobot(tmp_path / "saved", loaded.parts, loaded.model.state_dict(), base="allenai/MolmoAct2")
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    steps = json.loads((saved / "policy_preprocessor.json").read_text())["steps"]
    theirs = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps] == [step["registry_name"] for step in theirs]
    assert steps[3]["state_file"] == theirs[3]["state_file"]
    original_statistics, saved_statistics = (
        load_file(folder / theirs[3]["state_file"]),
        load_file(saved / steps[3]["state_file"]),
    )
    assert original_statistics.keys() == saved_statistics.keys()
    assert all(torch.equal(original_statistics[name], saved_statistics[name]) for name in original_statistics)
    post = json.loads((saved / "policy_postprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in post][:2] == ["molmoact2_clamp_action", "molmoact2_masked_unnormalizer"]
    config, original = json.loads((saved / "config.json").read_text()), policy_config("allenai/MolmoAct2")
    named = original.keys() & config.keys() - {"device", "input_features", "dataset_feature_names"}
    filled = {"setup_type": "an arm", "control_mode": "joint pose", "image_keys": list(released.CAMERAS)}
    assert {name: config[name] for name in named} == {name: (original | filled)[name] for name in named}
    shutil.rmtree(mine)
    again = load_policy(saved)
    assert again.settings == loaded.settings.model_copy(update={"norm_tag": "trained"})
    assert again.parts.robot == loaded.parts.robot
    assert all(torch.equal(again.model.state_dict()[name], one) for name, one in loaded.model.state_dict().items())


def test_export_command_writes_the_checkpoint_and_never_overwrites(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_policy(folder, SETTINGS)
    trained = save_policy(tmp_path / "artifact/checkpoint", loaded.parts, loaded.model.state_dict()).parent
    expected = save_lerobot(tmp_path / "expected", loaded.parts, loaded.model.state_dict(), base="some/base")
    app(["export", str(trained), str(tmp_path / "exported"), "--base", "some/base"], standalone_mode=False)
    assert capsys.readouterr().out.strip() == str(tmp_path / "exported")
    files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert all((expected / file).read_bytes() == (tmp_path / "exported" / file).read_bytes() for file in files)
    with refused("output_exists", tmp_path / "exported"):
        app(["export", str(trained), str(tmp_path / "exported")], standalone_mode=False)


def test_base_on_the_hub_needs_a_revision_or_a_folder(folder: Path, base: Path) -> None:
    released.write(folder / "config.json", policy_config("allenai/MolmoAct2"))
    with refused("revision_missing", "allenai/MolmoAct2", "checkpoint_revision"):
        load_parts(folder, SETTINGS)
    parts = load_parts(folder, SETTINGS.model_copy(update={"checkpoint_path": str(base)}))
    assert parts.files == base


def set_to(*path: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    """Change the configuration at a path of keys."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return change


def tensor(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.update({name: torch.zeros(RANK, 2)})


def half_an_adapter(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["model.base_model.model.lm_head.lora_B.default.weight"]


LORA, MAGNITUDE = ("model.base_model.model.lm_tail.lora_A", "model.base_model.model.lm_head.lora_magnitude_vector")


@pytest.mark.parametrize(
    ("change", "code", "place"),
    [
        (set_to("joint_signs", value=[1.0, -1.0]), "joint_signs_unsupported", "joint_signs"),
        (set_to("type", value="pi05"), "policy_type_mismatch", "pi05"),
        (set_to("normalization_mapping", "ACTION", value="MIN_MAX"), "normalization_unsupported", "MIN_MAX"),
        (set_to("lora_alpha", value=None), "lora_alpha_missing", "config.json"),
        (tensor(f"{LORA}.default.weight"), "adapter_incomplete", "lm_tail"),
        (half_an_adapter, "adapter_incomplete", "lm_head"),
        (tensor(f"{MAGNITUDE}.default.weight"), "adapter_incomplete", "lora_magnitude_vector"),
        (tensor("lm_head.weight"), "unknown_weight_name", "lm_head.weight"),
    ],
    ids=[
        "frame",
        "policy",
        "normalization",
        "no alpha",
        "stray adapter",
        "half an adapter",
        "kind of adapter",
        "prefix",
    ],
)
def test_rejects_unsupported_lerobot_checkpoint(
    base: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None], code: str, place: str
) -> None:
    stored, _ = adapted(released.weights(seed=1))
    folder = write_lerobot(tmp_path / "lora", base, stored)
    config, tensors = policy_config(str(base)), load_file(folder / "model.safetensors")
    change(config, tensors)
    released.write(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors")
    with refused(code, place, folder):
        load_policy(folder, SETTINGS)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/hostname", "a/b.safetensors", None])
def test_rejects_statistics_in_another_folder(folder: Path, name: object) -> None:
    file = folder / "policy_preprocessor.json"
    document = json.loads(file.read_text())
    (step,) = (step for step in document["steps"] if "state_file" in step)
    shutil.copyfile(folder / step["state_file"], folder.parent / "elsewhere.safetensors")
    step["state_file"] = name
    released.write(file, document)
    with refused("unsafe_file_name", file):
        load_parts(folder, SETTINGS)


@pytest.mark.parametrize("file", ["config.json", "policy_preprocessor.json"])
@pytest.mark.parametrize(
    "content", ["[]", "null", "{}", '{"type": "molmoact2"}', '{"steps": [1]}', "[" * 100_000, "\xff"]
)
def test_rejects_files_with_other_json(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(DataError):
        load_parts(folder, SETTINGS)
