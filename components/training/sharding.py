"""A model split over ranks with FSDP2: weights, gradients and moments are fp32 and lie in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from components.training.ranks import Ranks

Unit = tuple[nn.Module, torch.dtype | None]
"""What is gathered at once, and the dtype it computes in; None: that of its weights."""
Model = TypeVar("Model", bound=nn.Module)


def sharder(
    ranks: Ranks, units: Callable[[Model], Iterable[Unit]], *, cast_inputs: bool, methods: Iterable[str] = ()
) -> Callable[[Model], None]:
    """What splits a model over `ranks`.

    Args:
        units: those of a model, inner ones first, the model itself last.
        cast_inputs: whether a unit's inputs are cast to its dtype as well.
        methods: of the model, which gather its weights as `forward` does.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))

    def shard(model: Model) -> None:
        model.float()
        for module, dtype in units(model):
            precision = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
            )
            # Resharded explicitly: by default the root stays whole after a forward pass without a backward, and then
            # its parameters are not those that the optimizer knows.
            fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        for name in methods:
            register_fsdp_forward_method(model, name)

    return shard


def blocks(model: nn.Module, classes: Iterable[str], dtype: torch.dtype | None) -> Iterator[Unit]:
    """The modules of `classes`, inner ones first, and then the model."""
    names = frozenset(classes)
    yield from ((module, dtype) for module in reversed(list(model.modules())) if type(module).__name__ in names)
    yield model, dtype
