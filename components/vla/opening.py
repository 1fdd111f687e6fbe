"""The model of a training of a policy: read whole, or split over ranks while it is read; and written again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.lora import merged_weights
from armature.components.models.mapped import MappedWeights
from armature.components.policies.molmoact2.checkpoints.checkpoint import (
    empty_model,
    load_model,
    read_model,
    save_policy,
)
from armature.components.policies.molmoact2.checkpoints.parts import PolicyParts
from armature.components.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks, whole
from armature.components.training.sharding import sharder
from armature.components.vla.sharding import units


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
