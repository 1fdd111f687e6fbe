"""The units of a policy that is split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from armature.components.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.training.sharding import Unit


def units(model: MolmoAct2, precision: str) -> Iterator[Unit]:
    """With `precision` bfloat16 the VLM is gathered and computes in bf16, the action expert in fp32 as in one process.

    The expert is one: the projections of the contexts are used between its blocks. Every weight is in a module that
    sampling calls, or in the expert, so that a policy can be asked without the root's forward pass.
    """
    lower = torch.bfloat16 if precision == "bfloat16" else None
    body = model.vlm.model
    vlm = [
        *body.vision_tower.layers,
        body.vision_tower,
        body.multi_modal_projector,
        *body.language_model.layers,
        body.language_model.embed_tokens,
        body.language_model,
        model.vlm.lm_head,
    ]
    yield from ((module, lower) for module in vlm)
    yield model.action_expert, None
    register_fsdp_forward_method(model.action_expert, "velocity_and_states")
    if model.value_head is not None:
        yield model.value_head, None
    yield model, lower


@contextmanager
def whole_expert(model: MolmoAct2) -> Iterator[None]:
    """Within it a sharded expert is gathered: sampling uses parts of it, which gather nothing by themselves."""
    expert = model.action_expert
    if not isinstance(expert, FSDPModule):
        yield
        return
    expert.unshard()
    try:
        yield
    finally:
        expert.reshard()
