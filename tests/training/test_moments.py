"""Optimizer states in main memory, which change no bit, and in 8 bits, compared with an update by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from armature.components.models.blockwise import CHUNK, NF4, SIGNED, UNSIGNED, Codes
from armature.components.training.checkpoints import Checkpoints
from armature.components.training.engine import ParameterGroup, SkippedUpdates, TrainingEngine
from armature.components.training.optimizer import CompensatedAdamW
from armature.components.training.optimizer_state import SMALL
from armature.components.training.ranks import Ranks
from tests.refusals import refused

HYPER: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((96, 50), (7,), (33, 200))
"""Shapes of the test's parameters. The first and the last have at least SMALL elements, and their numbers of elements
are not multiples of the block size."""


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=random).to(device, dtype)) for shape in SHAPES]
    for parameter in made:
        parameter.grad_dtype = torch.float32
    return made


def train(made: list[nn.Parameter], states: Any, updates: range, optimizer: Any = None) -> CompensatedAdamW:
    low = made[0].dtype == torch.bfloat16
    optimizer = optimizer or CompensatedAdamW([{"params": made, "lr": 1e-3}], masters=low, states=states, **HYPER)
    for update in updates:
        random = torch.Generator().manual_seed(update)
        for parameter in made:
            parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.device)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_main_memory_equal_states_on_device(dtype: torch.dtype, device: str) -> None:
    plain, moved = parameters(dtype, device), parameters(dtype, device)
    train(plain, "device", range(20))
    optimizer = train(moved, "cpu", range(20))
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    devices = {name: value.device.type for name, value in optimizer.state[moved[0]].items()}
    assert devices == dict.fromkeys(["step", "exp_avg", "exp_avg_sq", *["low"] * (dtype == torch.bfloat16)], "cpu")
    assert optimizer.state[moved[1]]["exp_avg"].device.type == device, "the states of a norm are too small to move"
    if device == "cuda":
        assert optimizer.state[moved[0]]["exp_avg"].is_pinned()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_rank_has_the_states_of_its_shards_in_main_memory(device: str, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        plain = parameters(torch.float32, device)
        split = [nn.Parameter(distribute_tensor(p.detach(), mesh)) for p in plain]
        optimizer = CompensatedAdamW([{"params": split, "lr": 1e-3}], states="cpu", **HYPER)
        train(plain, "device", range(3))
        for update in range(3):
            random = torch.Generator().manual_seed(update)
            for parameter in split:
                parameter.grad = distribute_tensor(torch.randn(parameter.shape, generator=random).to(device), mesh)
            optimizer.step()
        assert all(torch.equal(one, other.full_tensor()) for one, other in zip(plain, split, strict=True))
        moment = optimizer.state[split[0]]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.to_local().device.type == "cpu"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("codes", [NF4, SIGNED, UNSIGNED], ids=["nf4", "signed", "unsigned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantization_picks_nearest_code_of_block(codes: Codes, dtype: torch.dtype) -> None:
    numbers = torch.randn(37, 41, generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers = numbers.abs() if codes is UNSIGNED else numbers
    numbers.view(-1)[: codes.block] = 0
    indices, scales = codes.quantize(numbers)
    back = codes.dequantize(indices, scales).numpy().reshape(-1)
    values, flat = np.array(codes.values), numbers.float().numpy().reshape(-1)
    assert len(values) in (16, 256) and all(a < b for a, b in pairwise(values))
    for start in range(0, len(flat), codes.block):
        block = flat[start : start + codes.block].astype(np.float64)
        scale = np.abs(block).max()
        errors = np.abs(block[:, None] - values * scale)
        error = np.abs(block - back[start : start + codes.block])
        np.testing.assert_allclose(error, errors.min(1), atol=1e-7 * max(scale, 1e-9))
        assert scales[start // codes.block] == scale
    again, _ = NF4.quantize(NF4.dequantize(*NF4.quantize(numbers), dtype))
    assert torch.equal(again, NF4.quantize(numbers)[0]), "what NF4 can hold is rounded no further, in bf16 too"


def test_quantizes_large_tensor_in_parts() -> None:
    part = torch.randn(CHUNK // 1024, generator=torch.Generator().manual_seed(0))
    large = torch.cat([part.repeat(1024), part])
    indices, scales = SIGNED.quantize(large)
    once = SIGNED.quantize(part)
    assert torch.equal(indices[-len(part) :], once[0]) and torch.equal(scales[-len(once[1]) :], once[1])
    assert torch.equal(SIGNED.dequantize(indices, scales)[-len(part) :], SIGNED.dequantize(*once))


def by_hand(weight: np.ndarray[Any, Any], gradients: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the weight after AdamW updates in float64.

    After each update the moments are rounded to the nearest code.
    """

    def rounded(moment: np.ndarray[Any, Any], codes: Codes, least: int) -> np.ndarray[Any, Any]:
        values, flat, blocks = np.array(codes.values), moment.reshape(-1), []
        for start in range(0, len(flat), 256):
            block = flat[start : start + 256]
            scale = np.abs(block).max()
            index = np.abs(block[:, None] / scale - values).argmin(1)
            index[block != 0] = np.maximum(index, least)[block != 0]
            blocks.append(values[index] * scale)
        return np.concatenate(blocks).reshape(moment.shape)

    (beta1, beta2), eps, decay, rate = HYPER["betas"], HYPER["eps"], HYPER["weight_decay"], 1e-3
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for step, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        root = np.sqrt(v / (1 - beta2**step)) + eps
        weight = weight * (1 - rate * decay) - rate * m / (1 - beta1**step) / root
        m, v = rounded(m, SIGNED, 0), rounded(v, UNSIGNED, 1)
    return weight


def test_eight_bit_moments_match_manual_update() -> None:
    ours, plain = parameters(torch.float32), parameters(torch.float32)
    start = plain[0].detach().clone()
    gradients = []
    for update in range(12):
        random = torch.Generator().manual_seed(update)
        gradients.append(torch.randn(SHAPES[0], generator=random).double().numpy())
    optimizer = train(ours, "8bit", range(12))
    train(plain, "device", range(12))
    expected = torch.from_numpy(by_hand(start.double().numpy(), gradients))
    distance = (ours[0].detach() - expected).abs()
    # For a moment halfway between two codes, fp32 and float64 may choose different ones.
    assert (distance > 1e-6).float().mean() < 2e-3 and distance.max() < 2e-3
    moved = (plain[0] - start).norm()
    assert 0 < (ours[0] - plain[0]).norm() / moved < 0.03
    assert torch.equal(ours[1], plain[1]), "those of norms are as they are"
    state = {name: (value.dtype, value.numel()) for name, value in optimizer.state[ours[0]].items()}
    assert state["exp_avg"] == state["exp_avg_sq"] == (torch.uint8, 4800)
    assert state["exp_avg_scales"] == state["exp_avg_sq_scales"] == (torch.float32, 19)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_eight_bit_kernels_match_plain_operations(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """For fp32 weights torch makes the update on both sides, so all bits are equal. The kernel for bf16 weights may
    fuse a product and a sum, after which a moment between two codes may get the other one."""
    kernel, plain = parameters(dtype, "cuda"), parameters(dtype, "cuda")
    ours = train(kernel, "8bit", range(5))
    monkeypatch.setattr("armature.components.training.optimizer_state.TRITON", False)
    theirs = train(plain, "8bit", range(5))
    for one, other in zip(kernel, plain, strict=True):
        pairs = [(value, theirs.state[other][name]) for name, value in ours.state[one].items()]
        if dtype == torch.float32:
            assert torch.equal(one, other) and all(torch.equal(*pair) for pair in pairs)
        else:
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3)
            assert all((a == b).float().mean() > 0.98 for a, b in pairs if a.dtype == torch.uint8)


def test_eight_bit_moments_keep_weight_without_gradient_in_place() -> None:
    """Its second moment is far below the largest of its block. Rounded to 0, the update would divide by eps alone."""
    weight = nn.Parameter(torch.zeros(SMALL))
    optimizer = CompensatedAdamW([{"params": [weight], "lr": 1e-3}], states="8bit", **HYPER | {"weight_decay": 0.0})
    for update in range(30):
        gradient = torch.full((SMALL,), 1e-3 if update == 0 else 0.0)
        gradient[0] = 100.0
        weight.grad = gradient
        optimizer.step()
    assert weight[1:].abs().max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["cpu", "8bit"])
def test_resume_with_stored_states_equals_uninterrupted_run(states: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    class Learner:
        def __init__(self, states: Any) -> None:
            self.model = nn.ParameterList(parameters(dtype))
            self.steps_done, self.skipped = 3, SkippedUpdates()
            self.optimizer = train(list(self.model), states, range(0))

    straight, resumed, other = Learner(states), Learner(states), Learner("device")
    train(list(straight.model), states, range(5), straight.optimizer)
    checkpoints = Checkpoints(tmp_path, {}, Ranks(), keep=2)
    path = checkpoints.save(straight, {})
    checkpoints.wait()
    checkpoints.load(resumed, path)
    for learner in (straight, resumed):
        train(list(learner.model), states, range(5, 9), learner.optimizer)
    assert all(torch.equal(one, two) for one, two in zip(straight.model, resumed.model, strict=True))
    if states == "8bit":
        with refused("checkpoint_mismatch", "exp_avg_scales"):
            checkpoints.load(other, path)


def test_rejects_eight_bit_states_for_sharded_model() -> None:
    model = nn.Linear(64, 64)
    group = ParameterGroup("all", list(model.parameters()), lambda _: 1e-3, 0.0)
    with refused("optimizer_states_not_split", "trainer.optimizer_states", '"cpu"'):
        TrainingEngine(
            model, [group], Ranks(), sharded=True, betas=(0.9, 0.95), eps=1e-8, max_grad_norm=1.0, states="8bit"
        )
