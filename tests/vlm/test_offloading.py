"""Activations that wait in main memory: the same bits, and weights do not take part."""

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
def test_a_step_has_the_same_bits(tiny, model, changes, monkeypatch):
    moved: list[torch.Tensor] = []
    back = memory.from_main_memory
    monkeypatch.setattr(memory, "from_main_memory", lambda kept: [back(kept), moved.append(kept)][0])
    device, done = changes.pop("device", "cpu"), []
    for offload in (False, True):
        torch.manual_seed(0)  # of the adapters
        learner = Learner(
            tiny.model(**model),
            trainer_settings(activation_offloading=offload, **changes),
            temperature=1.0,
            ranks=Ranks(device=torch.device(device)),
        )
        metrics = step(learner, tiny, tiny.samples(6, seed=1))
        assert any(isinstance(kept, tuple) for kept in moved) is offload
        done.append((metrics["loss"], metrics["grad_norm"], list(learner.model.parameters())))
    assert done[0][:2] == done[1][:2]
    assert all(torch.equal(one, other) for one, other in zip(done[0][2], done[1][2], strict=True))


def test_weights_and_what_is_small_stay():
    weight = nn.Parameter(torch.randn(256, 256))
    for tensor in (weight, weight.t(), weight[:128], torch.randn(8)):
        assert memory.to_main_memory(tensor) is tensor
    hidden = torch.randn(256, 256).t()
    kept = memory.to_main_memory(hidden)
    assert isinstance(kept, tuple) and kept[1].data_ptr() != hidden.data_ptr()
    assert torch.equal(memory.from_main_memory(kept), hidden) and kept[1].stride() == hidden.stride()


def test_no_weight_is_copied_by_a_layer_of_a_model(tiny, monkeypatch):
    model = tiny.model()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copied: list[int] = []
    to = memory.to_main_memory

    def noted(tensor: torch.Tensor) -> Any:
        kept = to(tensor)
        copied.extend([tensor.untyped_storage().data_ptr()] if isinstance(kept, tuple) else [])
        return kept

    monkeypatch.setattr(memory, "to_main_memory", noted)
    ids = torch.arange(64)[None]
    with memory.offloaded_activations():
        model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids)).logits.sum().backward()
    assert copied and weights.isdisjoint(copied)
