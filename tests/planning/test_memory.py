"""Memory estimates of a rank compared with FSDP2 itself, and of a robot policy compared with measured GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, SmolVLMConfig

from armature.components.families.family import family_of
from armature.components.families.tiny import TinySettings
from armature.components.models.load import load_model
from armature.components.models.settings import AdapterSettings, ModelSettings
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.planning.memory import ModelSizes, RecipeMemory, model_sizes, read_config, server_parts
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.imitation.settings import Mode, VLATrainerSettings
from armature.components.robots.planning import PolicySizes, policy_sizes, policy_trainer_parts
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.checkpoint import SmolVLAParts
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig
from armature.components.robots.policies.smolvla.model import SmolVLA
from armature.components.robots.policies.smolvla.processor import SmolVLABatch
from armature.components.training.ranks import Ranks
from armature.components.training.sharding import blocks, sharder
from armature.components.vlm.settings import TrainerSettings
from benchmarks.model_sizes import policy_config_of
from benchmarks.policy_ours import trainer_settings

GIB = 2**30
DOCS = Path(__file__).parents[2] / "docs"
TINY = TinySettings(layers=3)
MODEL = ModelSettings(source="tiny/qwen2-vl", tiny=TINY, dtype="float32")
TRAINER = TrainerSettings(learning_rate=1e-3, max_steps=1, max_tokens_per_micro_batch=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("qwen2-vl", tmp_path_factory.mktemp("model") / "qwen2-vl", 0, TINY)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield Ranks(0, 2)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return model_sizes(read_config(MODEL), MODEL, TRAINER, "float32")


def sharded(folder: Path, ranks: Ranks) -> nn.Module:
    """Load a model as the first rank of a sharded trainer does."""
    loaded = load_model(folder, MODEL)
    model = load_model(folder, MODEL, empty=True)
    units = partial(blocks, family=family_of(model.config), dtype=None)
    sharder(ranks, 1, units, dict(loaded.state_dict()), cast_inputs=True)(model)
    return model


def test_model_sizes_equal_loaded_model(folder: Path, sizes: ModelSizes) -> None:
    assert sizes.parameters == sum(parameter.numel() for parameter in load_model(folder, MODEL).parameters())


def test_estimate_equals_bytes_of_sharded_rank(folder: Path, ranks: Ranks, sizes: ModelSizes) -> None:
    parameters = list(sharded(folder, ranks).parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    optimizer.step()
    held = [value for p in parameters for value in (p, p.grad, *optimizer.state[p].values())]
    bytes_ = sum(value.to_local().nbytes for value in held if isinstance(value, DTensor))
    estimate = sizes.estimate.over(2)
    assert bytes_ == pytest.approx(estimate.weights + estimate.optimizer, rel=0.01)
    assert sizes.estimate.over(2, sharing=2).activations == sizes.estimate.activations // 2


def test_estimate_equals_fsdp_shards_of_7b_model(tmp_path: Path) -> None:
    """Qwen2.5-VL-7B without weights, sharded by FSDP2 with the trainer's units; a shard is whole rows of a tensor."""
    config = CONFIG_MAPPING["qwen2_5_vl"](
        text_config={"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18944, "vocab_size": 152_064},
        vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
        tie_word_embeddings=False,
    )
    settings = ModelSettings(source=str(tmp_path), gradient_checkpointing=True)
    sizes = model_sizes(config, settings, TRAINER, "bfloat16")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (64,))
        for module, _ in blocks(model, family_of(config), None):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        local = sum(parameter.to_local().nbytes for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    assert sizes.parameters > 8e9 and local == pytest.approx(sizes.estimate.over(64).weights, rel=0.01)
    # Computed by hand: keys and values of 4 heads of 128 in 28 layers, 2 bytes each.
    assert sizes.key_value_bytes == 2 * 4 * 128 * 28 * 2
    assert server_parts(sizes, 2, 3, 1000)["KV cache of 3 x 1,000 tokens"] == 3 * 1000 * sizes.key_value_bytes // 2


def test_only_layers_of_gemma4_that_compute_keys_cache_them() -> None:
    """Of four layers the first has two heads of 32, the second two of 64, and the others reuse keys and values."""
    settings = ModelSettings(source="tiny/gemma4", tiny=TinySettings())
    sizes = model_sizes(read_config(settings), settings, TRAINER, "bfloat16")
    assert sizes.key_value_bytes == 2 * (2 * 2 * 32 + 2 * 2 * 64)


def test_linear_attention_has_a_state_in_place_of_keys_and_values(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["qwen3_5"]()  # sizes of Qwen3.5-9B: every fourth of 32 layers has keys and values
    settings = ModelSettings(source=str(tmp_path), gradient_checkpointing=True)
    tokens = 640
    trainer = TRAINER.model_copy(update={"max_tokens_per_micro_batch": tokens})
    sizes = model_sizes(config, settings, trainer, "bfloat16")
    state = 32 * 128 * 128 * 4
    assert sizes.key_value_bytes == 2 * 4 * 256 * 8 * 2 and sizes.state_bytes == 24 * state
    assert server_parts(sizes, 2, 3, 1000)["recurrent states"] == 3 * 24 * state // 2
    # Inputs of all layers, states, and of the layer that is recomputed norms, 16 and 4 heads, their norms, and the MLP.
    values = 8 * 4096 + 2 * 20 * 256 + 3 * 20 * 256 + 4 * 12288
    assert sizes.estimate.activations == (values + 32 * 4096) * 2 * tokens + 10 * state


@pytest.mark.parametrize(
    ("together", "share", "on_gpu", "least"),
    [
        pytest.param(False, 0.9, True, 40 * 1.15, id="the larger of two GPUs"),
        pytest.param(False, 0.25, True, 20 / 0.25, id="a server's share of its GPU"),
        pytest.param(True, 0.5, True, 2 * 40 * 1.15, id="the trainer beside a server's share"),
        pytest.param(True, None, True, 60 * 1.15, id="a policy that plays beside its trainer"),
        pytest.param(False, 0.9, False, 2 * 40 * 1.15 + 3 * 20, id="all processes in main memory"),
    ],
)
def test_fits_from_required_capacity_on(together: bool, share: float | None, on_gpu: bool, least: float) -> None:
    memory = RecipeMemory({"weights": 30, "activations": 10}, 2, {"weights": 20}, 3, together, share, on_gpu)
    assert memory.fits(least + 0.01) and not memory.fits(least - 0.01)


@pytest.fixture(scope="module")
def policy() -> RobotPolicySettings:
    return RobotPolicySettings(checkpoint_path="allenai/MolmoAct2-LIBERO", chunk_size=10, n_action_steps=10)


@pytest.fixture(scope="module")
def released(policy: RobotPolicySettings) -> PolicySizes:
    return policy_sizes(policy_config_of("allenai/MolmoAct2-LIBERO"), policy, 2)


@pytest.mark.parametrize(
    ("mode", "examples", "peak"),
    [
        ("expert", 8, 18.6),
        pytest.param("lora", 8, 22.3, marks=pytest.mark.long),
        ("full", 8, 51.9),
        ("expert", 32, 20.5),
        ("lora", 32, 30.1),
        pytest.param("full", 32, 56.6, marks=pytest.mark.long),
    ],
)
def test_policy_estimate_is_close_to_measured_peak(
    mode: Mode, examples: int, peak: float, policy: RobotPolicySettings, released: PolicySizes
) -> None:
    """The measured peaks are from an H200; see docs/benchmarks.md, MolmoAct2 of the released sizes."""
    settings = policy.model_copy(update={"action_mode": "continuous" if mode == "expert" else "both"})
    parts = policy_trainer_parts(released, settings, trainer_settings(mode, examples, compiled=True), 1, 8)
    assert sum(parts.values()) / GIB == pytest.approx(peak, rel=0.08)
    assert (
        f"| {mode} | {examples} |" in (DOCS / "benchmarks.md").read_text()
        and f"| {peak} GiB" in (DOCS / "benchmarks.md").read_text()
    )


def test_sharded_policy_bytes_per_trained_weight(policy: RobotPolicySettings, released: PolicySizes) -> None:
    expert = policy_trainer_parts(released, policy, trainer_settings("expert", 8, compiled=True), 8, 8)
    assert expert["weights"] == 4 * released.parameters // 8
    assert expert["gradients and optimizer"] == 12 * released.expert // 8
    assert expert["gathered"] > 4 * released.expert


SMOLVLA = RobotPolicySettings(family="smolvla", path="lerobot/smolvla_base", chunk_size=50, n_action_steps=50)


def released_smolvla() -> SmolVLAParts:
    """Return lerobot/smolvla_base and SmolVLM2-500M-Video-Instruct without weights and files."""
    text = {"model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
    text |= {"num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49280}
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vlm = SmolVLMConfig(text_config=text, vision_config=vision | {"image_size": 512, "patch_size": 16}, scale_factor=4)
    return SmolVLAParts(SmolVLAConfig(type="smolvla"), vlm, SMOLVLA, None, Path(), Path())


def kept(mode: Mode, **settings: Any) -> VLATrainerSettings:
    if mode in ("lora", "lora_expert"):
        settings["lora"] = AdapterSettings(rank=16, alpha=16.0)
    return VLATrainerSettings(mode=mode, max_steps=1, batch_size=1, micro_batch_size=1, **settings)


def test_smolvla_has_its_released_number_of_weights() -> None:
    sizes = policy_sizes(released_smolvla(), SMOLVLA, 2)
    assert round(sizes.parameters / 1e6) == 450 and round(sizes.expert / 1e6) == 100
    assert sizes.tokens == 2 * 64 + 48 + 1
    full, expert = (policy_trainer_parts(sizes, SMOLVLA, kept(mode), 1, 1) for mode in ("full", "expert"))
    assert full["weights"] == expert["weights"] == 2 * sizes.vlm + 4 * sizes.expert
    assert expert["gradients and optimizer"] == 12 * sizes.expert


@pytest.mark.parametrize(
    ("mode", "dropout"),
    [("full", {}), ("expert", {}), ("lora", {}), ("lora_expert", {}), ("lora_expert", {"lora_dropout": 0.0})],
)
def test_smolvla_activations_are_close_to_saved_tensors(mode: Mode, dropout: dict[str, float]) -> None:
    parts = released_smolvla()
    config, vlm = parts.config, parts.vlm
    config, vlm.vision_config.num_hidden_layers = config.model_copy(update={"num_vlm_layers": 4}), 3
    vlm.text_config.num_hidden_layers, vlm.text_config.vocab_size = 4, 100
    sizes = policy_sizes(replace(parts, config=config), SMOLVLA, 1)
    update = kept(mode, **dropout)
    model = SmolVLA(config, vlm, "bfloat16")
    prepare(model, update, "head")
    generator = torch.Generator().manual_seed(0)
    batch = SmolVLABatch(
        torch.ones(1, 48, dtype=torch.long),
        actions=torch.randn(1, 50, 32, generator=generator),
        seen=torch.ones(1, 48, dtype=torch.bool),
        images=torch.randn(1, 1, 3, 512, 512, generator=generator),
        state=torch.randn(1, 32, generator=generator),
        valid=torch.ones(1, 50, dtype=torch.bool),
        action_dimensions=7,
    )
    draws = FlowSamples.draw(1, 1, 50, config, generator)
    shapes = {shape for each in model.parameters() for shape in (each.shape, each.shape[::-1])}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape not in shapes:  # weights, and copies of them in bfloat16
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch, draws, None).total
    measured = sum(storage.nbytes() for storage in saved.values())
    estimate = policy_trainer_parts(sizes, SMOLVLA, update, 1, 1)["activations"]
    assert loss.requires_grad and 0.9 * measured < estimate < 1.4 * measured
