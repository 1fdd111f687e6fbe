"""Frozen weights in 4 bits (NF4): training and publishing give the same results as with dequantized weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.family import family_of
from armature.components.models.load import load_model, load_processor, read_model
from armature.components.models.lora import NF4Linear, base_model, merged_weights, quantized_layers
from armature.components.models.settings import LoraSettings
from armature.components.rl.open import QUANTIZED_BASE, base_weights
from armature.components.training.checkpoints import Checkpoints
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.memory import GIB, estimate_memory
from armature.components.vlm.publish import Publisher
from benchmarks.model_sizes import config_of
from tests.refusals import refused

from .conftest import Tiny, model_settings, score, step, trainer_settings

CODES = np.array(
    (
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ),
    np.float32,
)
"""The 16 NF4 codes from appendix E of the QLoRA paper, rounded to eight digits."""
LORA = LoraSettings(rank=4, alpha=8, targets=("q_proj", "down_proj"))


def stands_for(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers for which a weight's NF4 codes stand, in the weight's dtype.

    Each number is the nearest code times the largest absolute value in its block of 64 numbers.
    """
    blocks = weight.float().numpy().reshape(-1, 64)
    largest = np.abs(blocks).max(1, keepdims=True)
    nearest = np.abs((blocks / np.where(largest, largest, 1))[..., None] - CODES).argmin(-1)
    return torch.from_numpy(CODES[nearest] * largest).reshape(weight.shape).to(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_nf4_layer_equals_layer_with_dequantized_weight(dtype, autocast):
    torch.manual_seed(0)
    layer, plain = nn.Linear(96, 64).to(dtype), nn.Linear(96, 64).to(dtype)
    plain.load_state_dict({"weight": stands_for(layer.weight.detach()), "bias": layer.bias.detach()})
    quantized = NF4Linear(layer)
    torch.testing.assert_close(quantized.dequantized(), plain.weight.detach(), rtol=1e-6, atol=0)
    plain.weight.data.copy_(quantized.dequantized())
    assert torch.equal(NF4Linear(plain).weight, quantized.weight), "quantized again it is the same"
    assert sum(t.nbytes for t in (quantized.weight, quantized.scales)) == 96 * 64 // 2 + 4 * 96
    x, results = torch.randn(5, 96).to(dtype if not autocast else torch.float32), []
    for each in (quantized, plain):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = each(inputs)
        out.float().square().sum().backward()
        results.append((out.detach(), inputs.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-6)


def test_nf4_layer_saves_no_dequantized_weight():
    layer, saved = NF4Linear(nn.Linear(256, 256)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        layer(torch.randn(2, 256, requires_grad=True))
    assert sum(saved) == 256 * 256 // 2 + 4 * 256 * 4


def learners(tiny: Tiny, folder: Path, **changes: Any) -> tuple[Learner, Learner]:
    """Make two learners with equal adapters.

    The first has a model in 4 bits. The second has plain layers with the dequantized weights.
    """
    made = []
    for quantization in ("nf4", None):
        torch.manual_seed(0)
        model = load_model(folder, model_settings(lora=LORA, quantization=quantization, **changes))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        made.append(Learner(model, trainer_settings(), temperature=1.0))
    return made[0], made[1]


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_nf4_model_trains_like_dequantized_model(tiny, tmp_path, changes):
    settings = model_settings(lora=LORA, quantization="nf4")
    base = base_weights(tiny.folder, settings, tmp_path)
    assert base == tmp_path / QUANTIZED_BASE and base_weights(base, settings, tmp_path) == base
    assert base_weights(tiny.folder, model_settings(), tmp_path) == tiny.folder
    quantized, plain = learners(tiny, base, **changes)
    model = base_model(quantized.model)
    language = [layer for name, layer in quantized_layers(model, family_of(model.config)) if ".lora_" not in name]
    assert {type(layer) for layer in language} == {NF4Linear}
    assert not any(isinstance(module, NF4Linear) for module in model.model.visual.modules())
    samples = tiny.samples(6, seed=1)
    gradients: list[dict[str, torch.Tensor]] = []
    for learner in (quantized, plain):
        names = {id(p): name for name, p in learner.model.named_parameters()}
        recorded: dict[str, torch.Tensor] = {}
        learner.optimizer.register_step_pre_hook(
            lambda optimizer, *_, recorded=recorded, names=names: recorded.update(
                {names[id(p)]: p.grad.clone() for group in optimizer.param_groups for p in group["params"]}
            )
        )
        gradients.append(recorded)
    for one, other in zip(*(score(learner, tiny, samples) for learner in (quantized, plain)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    metrics = [step(learner, tiny, samples) for learner in (quantized, plain)]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-6)
    assert gradients[0].keys() == gradients[1].keys() and all("lora_" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert gradient.norm() > 0
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
    original = load_model(tiny.folder, model_settings()).state_dict()
    for name, value in load_model(base, model_settings()).state_dict().items():
        if name.endswith("layers.0.mlp.up_proj.weight"):
            torch.testing.assert_close(value, stands_for(original[name]), rtol=1e-6, atol=0)
        if "visual" in name or "lm_head" in name or "norm" in name:
            assert torch.equal(value, original[name])


def test_nf4_model_publishes_dequantized_weights(tiny, tmp_path):
    base = base_weights(tiny.folder, model_settings(lora=LORA, quantization="nf4"), tmp_path)
    quantized, plain = learners(tiny, base)
    folders = []
    for number, learner in enumerate((quantized, plain)):
        publisher = Publisher(learner.model, load_processor(base, model_settings()), tmp_path / "processor")
        assert publisher.float32
        folders.append(tmp_path / f"published-{number}")
        publisher.publish(learner.model, folders[-1], Ranks())
        sent = publisher.tensors(learner.model)
        written = {name: value for file in folders[-1].glob("*.safetensors") for name, value in load_file(file).items()}
        assert {name: value.shape for name, value in sent.items()} == {n: v.shape for n, v in written.items()}
        assert all(torch.equal(sent[name], value) for name, value in written.items())
    for file in folders[0].rglob("*.safetensors"):
        one, other = load_file(file), load_file(folders[1] / file.relative_to(folders[0]))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert dict(merged_weights(quantized.model)).keys() == dict(merged_weights(plain.model)).keys()


def test_nf4_training_resumes_bit_for_bit(tiny, tmp_path):
    base = base_weights(tiny.folder, model_settings(lora=LORA, quantization="nf4"), tmp_path)
    straight, resumed = learners(tiny, base)[0], learners(tiny, base)[0]
    checkpoints = Checkpoints(tmp_path / "checkpoints", {}, Ranks(), keep=1)
    step(straight, tiny, tiny.samples(4, seed=1))
    path = checkpoints.save(straight, {})
    checkpoints.wait()
    checkpoints.load(resumed, path)
    for learner in (straight, resumed):
        step(learner, tiny, tiny.samples(4, seed=2))
    pairs = zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


def test_rejects_nf4_with_sharding_or_without_adapters(tiny):
    settings = model_settings(lora=LORA, quantization="nf4")
    for split in (partial(load_model, empty=True), read_model):
        with pytest.raises(ConfigurationError) as caught:
            split(tiny.folder, settings)
        assert "model.quantization, machine.trainer.sharding" in caught.value.where
    with refused("value_error", "quantization", "lora"):
        model_settings(quantization="nf4")


def test_nf4_memory_estimate_equals_weights(tiny):
    settings = model_settings(lora=LORA, quantization="nf4", dtype="bfloat16")
    model = base_model(load_model(tiny.folder, settings))
    taken = sum(t.nbytes for name, t in model.state_dict().items() if ".lora_" not in name)
    assert estimate_memory(tiny.folder, settings, trainer_settings(), "bfloat16").weights == taken


def test_qwen2_5_vl_of_7b_fits_on_24_gib(tmp_path):
    config_of("Qwen/Qwen2.5-VL-7B-Instruct").save_pretrained(tmp_path)
    trainer = trainer_settings(weights="bfloat16", max_tokens_per_micro_batch=4096)
    fixed = {"lora": {"rank": 16, "targets": ("all",)}, "dtype": "bfloat16", "gradient_checkpointing": True}
    needed = {
        quantization: estimate_memory(
            tmp_path, model_settings(quantization=quantization, **fixed), trainer, "bfloat16"
        ).trainer
        for quantization in ("nf4", None)
    }
    assert needed["nf4"] < 12 * GIB and 16 * GIB < needed[None] < 24 * GIB
