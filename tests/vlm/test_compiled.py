"""Training with compiled layers, padded widths, and bf16 weights, compared with plain fp32 training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from armature.components.families.family import FAMILIES, family_of
from armature.components.models.compiled import _compiled, _recomputing, compile_layers, pad_widths
from armature.components.models.load import kept_in_fp32
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.logprobs import Policy
from tests.compiling import trace_only
from tests.refusals import refused

from .conftest import LORA, assert_same_step, learner_of, step, stepped, trainer_settings
from .test_packing import conversations


@pytest.fixture
def own_layers() -> Iterator[None]:
    """Clear the caches of compiled functions before and after a test, because some tests only trace."""
    for cached in (_compiled, _recomputing):
        cached.cache_clear()
    yield
    for cached in (_compiled, _recomputing):
        cached.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("own_layers")
@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.long), True])
@trace_only()
def test_compiled_step_equals_plain_step(packing, tiny):
    """The cases are padded rows with adapters, and packed rows with recomputed layers."""
    samples, done = conversations(tiny), []
    for compiled in (False, True):
        torch.manual_seed(0)  # adapters are initialized randomly
        model = tiny.model(gradient_checkpointing=packing, lora=None if packing else LORA)
        learner = learner_of(tiny, model, packing=packing, torch_compile=compiled, adam_epsilon=1e-3)
        done.append(stepped(learner, tiny, samples))
    assert_same_step(*done)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("own_layers")
def test_compiled_layers_equal_plain_layers(tiny):
    models = [tiny.model().train() for _ in range(2)]
    compile_layers(models[1])
    ids, outputs = torch.randint(20, (2, 24), generator=torch.Generator().manual_seed(0)), []
    for model in models:
        outputs.append(model(input_ids=ids).logits)
        outputs[-1].log_softmax(-1)[..., :20].mean().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
    for (name, plain), fused in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if plain.grad is not None:
            assert (fused.grad - plain.grad).norm() <= 1e-5 * plain.grad.norm(), name


def saved_by_tower(model: Any, pixels: torch.Tensor, **inputs: Any) -> tuple[int, list[torch.Tensor]]:
    """Run a vision tower on `pixels`.

    Return the number of elements that autograd saves (weights are not counted), and a list of outputs and gradients.
    """
    tower = model.get_submodule(family_of(model.config).vision[0])
    weights, sizes = {parameter.data_ptr() for parameter in tower.parameters()}, list[int]()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(0 if tensor.data_ptr() in weights else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden = tower(pixels, **inputs).last_hidden_state
    hidden.square().mean().backward()
    return sum(sizes), [hidden.detach(), *(p.grad for p in tower.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.usefixtures("own_layers")
@pytest.mark.parametrize("family", ["internvl", pytest.param("qwen2.5-vl", marks=pytest.mark.long)])
def test_compiled_recomputing_tower_equals_plain_and_saves_memory(family, make_tiny):
    """In qwen2.5-vl attention on a CPU is not compiled."""
    tiny = make_tiny(family)
    saved, outputs = {}, {}
    for compiled, recomputing in ((False, False), (False, True), (True, True)):
        model = tiny.model(gradient_checkpointing=recomputing)
        Policy(model, logprobs="torch", temperature=1.0)  # puts its checkpointing layers into training mode
        if compiled:
            compile_layers(model)
        vision = model.config.vision_config
        if family == "internvl":
            shape, inputs = (2, 3, *vision.image_size), {}
        else:
            shape = (96, 3 * vision.temporal_patch_size * vision.patch_size**2)
            inputs = {"grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8]])}
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        saved[compiled, recomputing], outputs[compiled, recomputing] = saved_by_tower(model, pixels, **inputs)
    for ours, theirs in zip(outputs[True, True], outputs[False, False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert saved[True, True] <= saved[False, True] < saved[False, False]


def test_padded_tower_step_equals_plain_step(make_tiny):
    tiny = make_tiny("qwen2.5-vl", vision_intermediate_size=100)
    samples, done = conversations(tiny), []
    for padded in (False, True):
        model = tiny.model(gradient_checkpointing=True)
        if padded:
            pad_widths(model)
        learner = learner_of(tiny, model, packing=True, adam_epsilon=1e-3)
        done.append(stepped(learner, tiny, samples))
    assert_same_step(*done)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_train_like_fp32_weights(family, make_tiny):
    """bf16 has 8 significant bits, so a forward and backward pass agree up to a few rounding errors."""
    tiny, norms = make_tiny(family), {}
    samples = conversations(tiny)
    for dtype in ("float32", "bfloat16"):
        for packing in (False, True):
            learner = learner_of(tiny, tiny.model(dtype=dtype), packing=packing, weights=dtype)
            kept = {id(tensor) for tensor in kept_in_fp32(learner.model)}
            assert {p.dtype for p in learner.model.parameters() if id(p) not in kept} == {getattr(torch, dtype)}
            norms[dtype, packing] = step(learner, tiny, samples)["grad_norm"]
            assert {state["exp_avg"].dtype for state in learner.optimizer.state.values()} == {torch.float32}
    assert norms["bfloat16", False] == pytest.approx(norms["float32", False], rel=0.03)
    assert norms["bfloat16", True] == pytest.approx(norms["float32", True], rel=0.03)


def test_bf16_adapters_have_masters(tiny):
    learner = learner_of(tiny, tiny.model(dtype="bfloat16", lora=LORA), weights="bfloat16")
    before = [parameter.detach().clone() for parameter in learner.trained]
    assert step(learner, tiny, conversations(tiny))["grad_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(learner.trained, before, strict=True))
    assert all(learner.optimizer.state[p]["low"].dtype == torch.int16 for p in learner.trained)


def test_rejects_bf16_weights_for_fp32_model(tiny):
    with refused("weights_dtype_mismatch", "torch.float32"):
        learner_of(tiny, tiny.model(), weights="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3"])
def test_gpu_compiled_bf16_layers_are_close_to_fp32(family, make_tiny):
    tiny, norms = make_tiny(family), []
    ways: list[dict[str, Any]] = [{}, {"torch_compile": True}, {"torch_compile": True, "weights": "bfloat16"}]
    for way in ways:
        model = tiny.model(dtype=way.get("weights", "float32"))
        settings = trainer_settings(packing=True, **way)
        learner = Learner(model, settings, temperature=1.0, ranks=Ranks(device=torch.device("cuda")))
        norms.append(step(learner, tiny, conversations(tiny))["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(norms[0], rel=3e-2)


@pytest.mark.gpu
def test_gpu_widths_are_padded_in_bf16_only(make_tiny):
    tiny, widths = make_tiny("qwen2.5-vl", vision_intermediate_size=100), []
    ways: list[dict[str, Any]] = [{}, {"autocast": "bf16"}, {"weights": "bfloat16"}]
    norms = []
    for way in ways:
        settings = trainer_settings(packing=True, **way)
        model = tiny.model(dtype=way.get("weights", "float32"))
        learner = Learner(model, settings, temperature=1.0, ranks=Ranks(device=torch.device("cuda")))
        narrow = next(m for name, m in model.named_modules() if "visual" in name and name.endswith("down_proj"))
        narrow.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[-1]))
        norms.append(step(learner, tiny, conversations(tiny))["grad_norm"])
    assert list(dict.fromkeys(widths)) == [100, 128]
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=3e-2)
