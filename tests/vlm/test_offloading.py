"""Activation offloading: steps give the same bits, and weights are not copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from armature.components.training.ranks import Ranks
from armature.components.vlm import memory
from armature.components.vlm.learner import Learner

from .conftest import LORA, step, trainer_settings


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({}, {}),
        ({"gradient_checkpointing": True}, {"packing": True}),
        ({"lora": LORA}, {"autocast": "bf16"}),
        pytest.param({"gradient_checkpointing": True}, {"packing": True, "device": "cuda"}, marks=pytest.mark.gpu),
    ],
    ids=["kept", "recomputed and packed", "adapters in bf16", "on a GPU"],
)
def test_offloaded_step_equals_plain_step(tiny, model, changes, monkeypatch):
    moved: list[torch.Tensor] = []
    back = memory.from_main_memory
    monkeypatch.setattr(memory, "from_main_memory", lambda each: [back(each), moved.append(each)][0])
    device, done = changes.pop("device", "cpu"), []
    for offload in (False, True):
        torch.manual_seed(0)  # adapters are initialized randomly
        learner = Learner(
            tiny.model(**model),
            trainer_settings(activation_offloading=offload, **changes),
            temperature=1.0,
            ranks=Ranks(device=torch.device(device)),
        )
        metrics = step(learner, tiny, tiny.samples(6, seed=1))
        assert any(isinstance(each, tuple) for each in moved) is offload
        done.append((metrics["loss"], metrics["grad_norm"], list(learner.model.parameters())))
    assert done[0][:2] == done[1][:2]
    assert all(torch.equal(one, other) for one, other in zip(done[0][2], done[1][2], strict=True))


def test_weights_and_small_tensors_are_not_offloaded():
    weight = nn.Parameter(torch.randn(256, 256))
    for tensor in (weight, weight.t(), weight[:128], torch.randn(8)):
        assert memory.to_main_memory(tensor) is tensor
    hidden = torch.randn(256, 256).t()
    offloaded = memory.to_main_memory(hidden)
    assert isinstance(offloaded, tuple) and offloaded[1].data_ptr() != hidden.data_ptr()
    assert torch.equal(memory.from_main_memory(offloaded), hidden) and offloaded[1].stride() == hidden.stride()


def test_offloading_copies_no_weight(tiny, monkeypatch):
    model = tiny.model()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copied: list[int] = []
    to = memory.to_main_memory

    def recording(tensor: torch.Tensor) -> Any:
        offloaded = to(tensor)
        copied.extend([tensor.untyped_storage().data_ptr()] if isinstance(offloaded, tuple) else [])
        return offloaded

    monkeypatch.setattr(memory, "to_main_memory", recording)
    ids = torch.arange(64)[None]
    with memory.offloaded_activations():
        model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids)).logits.sum().backward()
    assert copied and weights.isdisjoint(copied)
