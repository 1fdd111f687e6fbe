"""SmolVLA through the training loop; beside LeRobot's own it is tested in tests/interop/lerobot/test_smolvla.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from armature.components.configuration import load_recipe
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.imitation.opening import open_model, prepare
from armature.components.robots.imitation.settings import TrainVLASettings
from armature.components.robots.policies.family import export_lerobot, family, family_at, load_model, refuse_sharding
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.norm_stats import FeatureNormStats, RobotMetadata
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.policies.settings import RobotPolicySettings, TinyPolicySettings
from armature.components.robots.policies.smolvla.processor import fitted
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import CHUNK, TINY, make_job
from .settings import LORA, training_settings

POLICY: dict[str, Any] = {
    "family": "smolvla",
    "tiny": TINY,
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "num_flow_timesteps": 2,
    "num_inference_steps": 2,
    "state_normalization": "mean_std",
    "action_normalization": "mean_std",
    "dtype": "float32",
}
PLAIN = dict.fromkeys(("setup_type", "control_mode"), "") | {"image_attention_at_inference": "bidirectional"}
CHANGES = POLICY | PLAIN | {"llm_residual_dropout": 0.1}


@pytest.fixture(scope="module")
def start(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the inputs of a training of a tiny SmolVLA."""
    folder = tmp_path_factory.mktemp("smolvla")
    family("smolvla").make_tiny_policy(folder / "checkpoint", RobotPolicySettings.model_validate(POLICY))
    return inputs | {"policy": folder}


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory) -> Path:
    """Return the folder of a checkpoint after one update."""
    job = make_job(start, tmp_path_factory.mktemp("trained"), CHANGES, max_steps=1, heldout=None)
    job.train()
    return job.checkpoint


CAMERA = "observation.images.front"


def robot() -> RobotMetadata:
    state, action = (FeatureNormStats(mean=(0,) * count, std=(1,) * count) for count in (2, 3))
    return RobotMetadata(camera_keys=(CAMERA,), state_stats=state, action_stats=action)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint/model.safetensors")


UNTRAINED = ("lm_head", "text_model.norm", "text_model.layers.1.", "embed_tokens")


@pytest.mark.parametrize(("mode", "more"), [("full", ()), ("lora", ("layernorm", "patch_embedding"))])
def test_training_changes_only_the_trained_parts_and_the_policy_plays(start, mode, more, tmp_path):
    job = make_job(start, tmp_path, CHANGES, mode=mode, **({"lora": LORA} if mode == "lora" else {}))
    job.train()
    before, after = weights(start["policy"]), weights(tmp_path)
    same = {name for name in before if torch.equal(before[name], after[name])}
    expected = {name for name in before if "vlm.model" in name or "lm_head" in name}
    expected = {name for name in expected if any(part in name for part in (*UNTRAINED, *more))}
    if mode == "lora":  # biases and norms of the frozen VLM stay
        expected |= {name for name in before if ".vlm." in name and (before[name].dim() == 1 or "position" in name)}
    assert same == expected
    rows = [json.loads(line) for line in job.history.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and all(row["loss"] > 0 for row in rows[1:])
    assert rows[-1]["heldout/loss"] < rows[0]["heldout/loss"]

    policy = open_flow_policy(tmp_path, "continuous", rows=1)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 24, 32, 3), dtype=np.uint8)
    seen = [
        RobotObservation({CAMERA: images[k]}, np.ones(2, np.float32) * k, task)
        for k, task in enumerate(("close the gripper now", "move"))
    ]
    chunks = policy.predict(seen, [3, 4])
    assert chunks.shape == (2, CHUNK, 3) and np.abs(chunks[0] - chunks[1]).max() > 1e-3
    assert policy.predict([policy.prepared(seen[1])], [4])[0].tobytes() == chunks[1].tobytes()


def gradients(model: Any, batch: Any, draws: Any) -> tuple[float, dict[str, torch.Tensor], int]:
    """Return the loss, the gradients, and the bytes that are kept for the backward pass besides the weights."""
    saved: dict[int, torch.UntypedStorage] = {}
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch, draws, None).total
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), found, sum(each.nbytes() for where, each in saved.items() if where not in weights)


def prepared(start: dict[str, Path], mode: str) -> tuple[Any, Iterator[tuple[Any, FlowSamples]]]:
    """Return a model prepared for training, and batches of two and three examples."""
    parts = family("smolvla").load_parts(start["policy"], robot=robot())
    model, processor = load_model(start["policy"], parts), parts.processor()
    prepare(model, training_settings(mode=mode, freeze_embedding=mode == "expert"), "head")

    def batches() -> Iterator[tuple[Any, FlowSamples]]:
        for count in (2, 3):
            rng, examples = np.random.default_rng(count), []
            for k in range(count):
                image = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
                seen = RobotObservation({CAMERA: image}, np.ones(2, np.float32) * k, "move " * (k + 1))
                examples.append(processor.encode(seen, rng.uniform(-1, 1, (CHUNK, 3)), None))
            yield processor.batch(examples), FlowSamples.per_example(range(count), 1, CHUNK, model.config)

    return model, batches()


@pytest.mark.parametrize("mode", ["expert", "full"])
def test_recomputed_layers_have_the_same_gradients_and_keep_less(start, mode):
    (plain, batches), (recomputing, _) = prepared(start, mode), prepared(start, mode)
    recomputing.checkpoint_gradients(True)
    for batch, draws in batches:
        (loss, expected, most), (again, actual, fewer) = (
            gradients(model, batch, draws) for model in (plain, recomputing)
        )
        assert again == loss and actual.keys() == expected.keys()
        assert all(torch.equal(value, actual[name]) for name, value in expected.items())
        assert fewer < most / 2


def test_images_and_text_keep_nothing_where_the_vlm_is_frozen(start):
    """Only the state is projected by the expert, so only its token has a gradient in the VLM."""
    model, batches = prepared(start, "expert")
    batch, _ = next(batches)
    shapes: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        prefix = model.encode(batch, model.action_expert)
    without_state = prefix.seen.shape[1] - 1
    assert shapes and not any(without_state in shape for shape in shapes)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["expert", "full"])
def test_compiled_layers_have_the_same_gradients(start, mode):
    (plain, batches), (compiled, _) = prepared(start, mode), prepared(start, mode)
    compiled.compile_layers(dynamic=True)
    for batch, draws in batches:
        (loss, expected, _), (near, actual, _) = (gradients(model, batch, draws) for model in (plain, compiled))
        assert near == pytest.approx(loss, rel=1e-5) and actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_export_names_the_vlm_and_keeps_the_weights(start, tmp_path):
    export_lerobot(start["policy"], tmp_path / "out", "me/vlm")
    assert json.loads((tmp_path / "out/config.json").read_text())["vlm_model_name"] == "me/vlm"
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == weights(start["policy"]).keys()
    assert all(torch.equal(value, exported[name]) for name, value in weights(start["policy"]).items())


@pytest.mark.parametrize(
    ("policy", "training", "name"),
    [
        ({"norm_tag": "x", "semantics": "seed"}, {}, "norm_tag, semantics"),
        ({"action_mode": "both"}, {}, "action_mode"),
        ({}, {"packing": {"max_row_tokens": 9, "max_row_examples": 2}}, "training.packing"),
    ],
)
def test_rejects_settings_without_effect(policy, training, name):
    with refused("value_error", name, kind=ValidationError):
        TrainVLASettings(policy=POLICY | policy, training=training_settings(**training))


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"images": {}}, "camera_image_missing", "observation.images.front"),
        ({"images": {"observation.images.front": np.zeros((4, 4, 4), np.uint8)}}, "invalid_image_array", (4, 4, 4)),
        ({"state": np.array([0, np.nan], np.float32)}, "observation_not_finite", "state"),
        ({"state": np.zeros((2, 2), np.float32)}, "dimensions_mismatch", (2, 2)),
        ({"actions": np.full((CHUNK, 3), np.inf)}, "action_not_finite", "step 0"),
        ({"actions": np.zeros((CHUNK - 1, 3))}, "chunk_shape_mismatch", (CHUNK - 1, 3)),
        ({"padding": [True]}, "chunk_shape_mismatch", (1,)),
    ],
)
def test_rejects_frames_that_it_cannot_train_on(start, change, code, where):
    processor = family("smolvla").load_parts(start["policy"], robot=robot()).processor()
    frame = {"images": {CAMERA: np.zeros((24, 32, 3), np.uint8)}, "state": np.zeros(2, np.float32), "task": "move"}
    more = {"actions": np.zeros((CHUNK, 3)), "padding": None}
    processor.encode(RobotObservation(**frame), **more)
    more |= {key: value for key, value in change.items() if key in more}
    with refused(code, where):
        processor.encode(RobotObservation(**frame | {key: change[key] for key in change if key in frame}), **more)


@pytest.mark.parametrize(
    ("field", "value"),
    [("attention_mode", "self_attn"), ("adapt_to_pi_aloha", True), ("num_expert_layers", 1), ("type", "pi0")],
)
def test_rejects_variants(start, field, value, tmp_path):
    shutil.copytree(start["policy"] / "checkpoint", tmp_path / "checkpoint")
    file = tmp_path / "checkpoint/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with refused("smolvla_config_invalid"):
        family_at(tmp_path).load_parts(tmp_path)


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "code", "where"),
    [
        (lambda folder: shutil.rmtree(folder / "vlm"), "checkpoint_file_missing", "vlm"),
        (lambda folder: (folder / "vlm/config.json").unlink(), "checkpoint_file_missing", "vlm/config.json"),
        (lambda folder: (folder / "vlm/tokenizer.json").unlink(), "foreign_file_unreadable", "vlm"),
        (lambda folder: changed(folder / "vlm/config.json", model_type="llama"), "vlm_unsupported", "llama"),
        (lambda folder: changed(folder / "config.json", resize_imgs_with_padding=[9, 28]), "vlm_unsupported", "9"),
        (lambda folder: (folder / "policy_preprocessor.json").unlink(), "normalization_statistics_missing", "copy"),
        (lambda folder: changed(folder / "policy_preprocessor.json", steps=5), "foreign_file_unreadable", "copy"),
        (
            lambda folder: changed(
                folder / "vlm/config.json",
                text_config=json.loads((folder / "vlm/config.json").read_text())["text_config"] | {"vocab_size": 100},
            ),
            "tokenizer_mismatch",
            "100 tokens",
        ),
    ],
    ids=["vlm", "config", "tokenizer", "other vlm", "small images", "statistics", "steps", "other tokenizer"],
)
def test_damaged_folder_is_named(trained, tmp_path, damage, code, where):
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    damage(folder)
    with refused(code, where):
        family("smolvla").load_parts(folder).processor()


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_rejects_weights_that_do_not_fit(start, damage, tmp_path):
    shutil.copytree(start["policy"] / "checkpoint", tmp_path / "checkpoint")
    tensors = weights(tmp_path)
    if damage == "missing":
        del tensors["model.state_proj.bias"]
    else:
        tensors["model.extra" if damage == "unknown" else "model.state_proj.bias"] = torch.zeros(3)
    save_file(tensors, tmp_path / "checkpoint/model.safetensors")
    with refused("weights_mismatch"):
        load_model(tmp_path, family("smolvla").load_parts(tmp_path))


def test_rejects_what_it_cannot_do(start):
    with refused("action_mode_mismatch"):
        family("smolvla").player(None, None, RobotPolicySettings.model_validate(POLICY), "discrete", 1)
    with refused("policy_setting_unsupported"):
        open_flow_policy(start["policy"], "continuous", 1, quantization="fp8")
    with refused("normalization_statistics_missing"):
        open_flow_policy(start["policy"], "continuous", 1)
    with refused("sharding_unsupported"):
        parts = family("smolvla").load_parts(start["policy"])
        open_model(start["policy"], parts, print, TrainerProcesses(processes=2, sharding="full"), Ranks())


@pytest.mark.parametrize("name", ["train-vla/smolvla-tiny", "train-vla-rl/smolvla-tiny"])
def test_split_over_two_gpus_is_refused_before_any_stage(name):
    machine = make_machine(trainer__gpus=(0, 1), trainer__processes=2)
    recipe = load_recipe(name).values
    with refused("sharding_unsupported", "machine.trainer.sharding"):
        recipe.model_copy(update={"machine": machine}).refuse_ahead()
    refuse_sharding("smolvla", TrainerProcesses.of(make_machine(machine, trainer__sharding="none")))
    refuse_sharding("molmoact2", TrainerProcesses.of(machine))


def test_rejects_a_robot_with_more_dimensions_than_the_model(start, tmp_path):
    narrow = POLICY | {"tiny": TinyPolicySettings.model_validate(TINY | {"max_action_dim": 2})}
    family("smolvla").make_tiny_policy(tmp_path / "checkpoint", RobotPolicySettings.model_validate(narrow))
    with refused("model_too_small"):
        make_job(start | {"policy": tmp_path}, tmp_path, CHANGES).train()


@pytest.mark.parametrize("shape", [(1, 400), (400, 1)])
def test_thin_images_keep_a_row_and_a_column_of_pixels(shape):
    x = fitted(np.full((*shape, 3), 255, np.uint8), 28, 28)
    assert x.shape == (3, 28, 28) and (x == 1).sum() == 3 * 28 and (x == -1).sum() == 3 * 28 * 27
