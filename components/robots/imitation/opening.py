"""The units of a policy that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.load import MappedWeights
from armature.components.models.lora import merged_weights
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import (
    empty_model,
    load_model,
    read_model,
    save_policy,
)
from armature.components.robots.policies.molmoact2.checkpoints.parts import PolicyParts
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks, whole
from armature.components.training.sharding import Unit, sharder


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


# The model of a training of a policy: read whole, or split over ranks while it is read; and written again.


@dataclass(frozen=True)
class OpenedModel:
    """A model that is prepared for its training.

    model: on the CPU; on the meta device where it is to be split. named: with shapes, dtypes and what requires a
    gradient, and `weights` by name, on the first rank of a split one; `model` and None on every other. shard: splits
    `model`, and gives each rank its shards; None: every rank has all of it.
    """

    model: MolmoAct2
    named: MolmoAct2
    weights: Mapping[str, Tensor] | None
    shard: Callable[[MolmoAct2], None] | None
    dtypes: Mapping[str, torch.dtype]

    def publish(self, folder: Path, parts: PolicyParts, ranks: Ranks) -> None:
        """Write the policy, adapters merged, in the dtypes that it was loaded in. Every rank calls it."""
        merged = merged_weights(self.model)
        weights = {name: whole(value).to(self.dtypes.get(name, value.dtype)) for name, value in merged}
        if ranks.first:
            save_policy(folder, parts, weights)


def open_model(
    source: Path,
    parts: PolicyParts,
    prepare: Callable[[MolmoAct2], object],
    processes: TrainerProcesses,
    ranks: Ranks,
) -> OpenedModel:
    """
    Args:
        prepare: freezes a model, and adds to it what is trained besides; called before it is split.

    Raises:
        ConfigurationError: ranks are to share sequences.
        DataError: a weight is missing, unknown or of another shape.
    """
    if ranks.context is not None:
        raise ConfigurationError(
            "ranks share sequences of vision-language models alone, and this is a robot policy",
            code="context_parallel_unsupported",
            where="machine.trainer_context_parallel",
            remedy="leave it out",
        )
    sharded = processes.sharding is not None
    model = empty_model(parts) if sharded else load_model(source, parts)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    prepare(model)
    if not sharded:
        return OpenedModel(model, model, None, None, dtypes)
    named, weights = model, None
    if ranks.first:
        named, stored = read_model(source, parts)
        prepare(named)
        weights = MappedWeights(named, stored)
    cut = partial(units, precision=parts.settings.dtype)
    methods = ("velocities", "answer_logits")
    shard = sharder(ranks, processes.copies, cut, weights, cast_inputs=False, methods=methods)
    return OpenedModel(model, named, weights, shard, dtypes)
