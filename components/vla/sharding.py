"""A policy split over several GPUs or processes with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from components.policies.molmoact2.modeling.model import MolmoAct2
from components.training.ranks import Ranks


def sharder(ranks: Ranks, precision: str) -> Callable[[MolmoAct2], None]:
    """What splits a policy over `ranks`.

    Weights, gradients and moments are fp32 and lie in shards; with `precision` bfloat16 the VLM is gathered and
    computes in bf16, the action expert in fp32 as in one process.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    lower = torch.bfloat16 if precision == "bfloat16" else None

    def shard(model: MolmoAct2) -> None:
        model.float()
        for module, dtype in units(model, lower):
            # Resharded explicitly: by default the root stays whole after a forward pass without a backward, and then
            # its parameters are not those that the optimizer knows.
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    return shard


def units(model: MolmoAct2, lower: torch.dtype | None) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """What is gathered at once, inner ones first, with the dtype it computes in; None: that of its weights.

    The expert is one: the projections of the contexts are used between its blocks. Every weight is in a module that
    sampling calls, or in the expert, so that a policy can be asked without the root's forward pass.
    """
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
