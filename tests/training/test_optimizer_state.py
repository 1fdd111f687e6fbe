"""Optimizer states in checkpoints: loaded with conversion where possible, or refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from armature.components.training.checkpoints import TENSORS, Checkpoints
from armature.components.training.engine import SkippedUpdates
from armature.components.training.optimizer import CompensatedAdamW
from armature.components.training.optimizer_state import STATE, WEIGHT
from armature.components.training.ranks import Ranks
from tests.refusals import refused

from .rewriting import rewrite

Tensors = dict[str, Tensor]
WHO = {"model": "small"}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def policy_adamw(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"name": "all", "params": list(model.parameters()), "lr": 0.1}]
    return CompensatedAdamW(groups, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, ema_decay=0.5)


OPTIMIZERS = {"adamw": adamw, "policy": policy_adamw}


def small(make: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> Any:
    """Make a learner whose model has two trained parameters of different shapes.

    A further layer of the model never gets a gradient.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "idle": nn.Linear(2, 2)}).to(dtype)
    return SimpleNamespace(
        model=model,
        optimizer=make(model),
        steps_done=0,
        skipped=SkippedUpdates(),
    )


def update(learner: Any, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = torch.randn(4, 3, dtype=learner.model["a"].weight.dtype)
    learner.model["a"](inputs).square().sum().backward()
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    learner.steps_done += 1


def saved(folder: Path, learner: Any, change: Callable[[Tensors], Any]) -> Path:
    path = save(learner, folder)
    rewrite(path, STATE, change)
    return path


def save(learner: Any, folder: Path) -> Path:
    checkpoints = Checkpoints(folder, WHO, Ranks(), 2)
    path = checkpoints.save(learner, {})
    checkpoints.wait()
    return path


def load(learner: Any, path: Path) -> None:
    Checkpoints(path.parent, WHO, Ranks(), 2).load(learner, path)


def as_bf16(tensors: Tensors) -> Tensors:
    return {key: value.bfloat16() if "exp_avg" in key else value for key, value in tensors.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_moments_are_converted_on_load(tmp_path: Path, name: str) -> None:
    """torch's AdamW keeps bf16 moments for bf16 weights. The next update equals one with rounded moments."""
    make = OPTIMIZERS[name]
    first, second = small(make), small(make)
    update(first, 1)
    path = saved(tmp_path, first, as_bf16)
    load(second, path)
    for parameter in first.model["a"].parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            first.optimizer.state[parameter][slot] = first.optimizer.state[parameter][slot].bfloat16().float()
    for learner in (first, second):
        update(learner, 2)
    for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two)
        assert first.optimizer.state[one].keys() == second.optimizer.state[two].keys()


def drop(key: str) -> Callable[[Tensors], Any]:
    return lambda tensors: {name: value for name, value in tensors.items() if name != key}


def put(key: str, value: Callable[[Tensors], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors | {key: value(tensors).clone().contiguous()}


MOMENT, BIAS = "a.weight|exp_avg", "a.bias|exp_avg"
DAMAGES: dict[str, tuple[Callable[[Tensors], Any], tuple[str, ...]]] = {
    "no count of steps": (drop("a.weight|step"), ("a.weight", "step")),
    "one moment": (drop(MOMENT), ("a.weight", "exp_avg")),
    "amsgrad": (put("a.weight|max_exp_avg_sq", lambda t: t[MOMENT]), ("max_exp_avg_sq",)),
    "sgd": (lambda t: {"a.weight|momentum_buffer": t[MOMENT]}, ("exp_avg, exp_avg_sq",)),
    "another model": (put("b.weight|exp_avg", lambda t: t[MOMENT]), ("b.weight",)),
    "no slot named": (put("a.weight", lambda t: t[MOMENT]), ()),
    "order of another": (lambda t: t | {MOMENT: t[BIAS], BIAS: t[MOMENT]}, ("[2, 3]",)),
    "a shape that broadcasts": (put(MOMENT, lambda t: t[MOMENT][:1]), (MOMENT, "[1, 3]", "[2, 3]")),
    "transposed": (put(MOMENT, lambda t: t[MOMENT].T), (MOMENT, "[3, 2]", "[2, 3]")),
    "double": (put(MOMENT, lambda t: t[MOMENT].double()), (MOMENT, "float64")),
    "complex": (put(MOMENT, lambda t: t[MOMENT].to(torch.complex64)), (MOMENT, "complex64")),
    "NaN": (put(MOMENT, lambda t: t[MOMENT] * float("nan")), (MOMENT,)),
    "endless": (put("a.bias|exp_avg_sq", lambda t: t[BIAS] / 0), ("a.bias|exp_avg_sq",)),
    "negative count": (put("a.weight|step", lambda t: torch.tensor(-1.0)), ("a.weight|step", "-1.0")),
    "count of nothing": (put("a.weight|step", lambda t: torch.tensor(0.0)), ("a.weight|step", "0.0")),
    "count between": (put("a.weight|step", lambda t: torch.tensor(1.5)), ("a.weight|step", "1.5")),
    "count for each": (put("a.weight|step", lambda t: torch.ones(2, 3)), ("a.weight|step", "[2, 3]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rejects_foreign_optimizer_state_before_any_change(tmp_path: Path, name: str, damage: str) -> None:
    make, (change, values) = OPTIMIZERS[name], DAMAGES[damage]
    first, second = small(make), small(make)
    update(first, 1)
    path = saved(tmp_path, first, change)
    before = {key: value.clone() for key, value in second.model.state_dict().items()}
    with refused("checkpoint_mismatch", path / TENSORS, *values):
        load(second, path)
    assert second.steps_done == 0 and not any(second.optimizer.state.values())
    assert all(torch.equal(value, before[key]) for key, value in second.model.state_dict().items())


def test_rejects_moments_that_would_lose_precision(tmp_path: Path) -> None:
    first, second = small(policy_adamw, torch.bfloat16), small(policy_adamw, torch.bfloat16)
    update(first, 1)
    path = saved(tmp_path, first, put(MOMENT, lambda t: t[MOMENT].float()))
    with refused("checkpoint_mismatch", MOMENT, "torch.float32", "torch.bfloat16"):
        load(second, path)


@pytest.mark.parametrize("damage", ["missing", "shape", "NaN"])
def test_rejects_weights_that_do_not_fit(tmp_path: Path, damage: str) -> None:
    first, second = small(adamw), small(adamw)
    update(first, 1)
    path = save(first, tmp_path)

    def change(tensors: Tensors) -> None:
        weight = tensors.pop("a.weight")
        if damage != "missing":
            tensors["a.weight"] = weight[:1].contiguous() if damage == "shape" else weight * float("nan")

    rewrite(path, WEIGHT, change)
    with refused("checkpoint_mismatch", "a.weight"):
        load(second, path)


def test_resumes_checkpoint_before_first_update(tmp_path: Path) -> None:
    first, second = small(policy_adamw), small(policy_adamw)
    first.steps_done, first.skipped = 2, SkippedUpdates(total=2, in_a_row=2)
    load(second, save(first, tmp_path))
    assert (second.steps_done, second.skipped) == (2, SkippedUpdates(total=2, in_a_row=2))
    for learner in (first, second):
        update(learner, 3)
    assert all(torch.equal(*pair) for pair in zip(first.model.parameters(), second.model.parameters(), strict=True))
