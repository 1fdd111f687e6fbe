"""A model split over ranks with FSDP2: weights, gradients and moments are fp32 and lie in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from armature.components.families.family import Family
from armature.components.training.ranks import Ranks

Unit = tuple[nn.Module, torch.dtype | None]
"""What is gathered at once, and the dtype it computes in; None: that of its weights."""
Model = TypeVar("Model", bound=nn.Module)
TOWER = 2**30
"""Parameters of a vision tower that is gathered as a whole, at most. Its blocks compute for less time on a few images
than a host needs to gather each.
"""


def sharder(
    ranks: Ranks,
    copies: int,
    units: Callable[[Model], Iterable[Unit]],
    weights: Mapping[str, Tensor] | None,
    *,
    cast_inputs: bool,
    methods: Iterable[str] = (),
    keep: bool = False,
) -> Callable[[Model], None]:
    """What splits a model, whose parameters may be on the meta device, over `ranks`.

    Args:
        copies: 1, or with more (HSDP) each equal part of the ranks, one after the other, holds all of the model.
        units: those of a model, inner ones first, the model itself last.
        weights: all parameters and buffers by name, on the first rank, which asks for one at a time and sends each
            rank its shards; None on the others.
        cast_inputs: whether a unit's inputs are cast to its dtype as well.
        methods: of the model, which gather its weights as `forward` does.
        keep: whether weights stay gathered from a forward pass to its backward pass.
    """
    mesh = ranks.mesh(copies)

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
        if keep:
            _keep_for_backward(model)
        # Not `to_empty`, which would also empty the buffers.
        model._apply(lambda t: torch.empty_like(t, device=ranks.device) if t.is_meta else t.to(ranks.device))
        _distribute(model, ranks, weights)

    return shard


def _keep_for_backward(model: nn.Module) -> None:
    """FSDP's own setting would keep them after a forward pass without a backward pass, too."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def reshard(after_forward: bool) -> None:
        for module in sharded:
            module.set_reshard_after_forward(after_forward, recurse=False)

    model.register_forward_pre_hook(lambda *_: reshard(not torch.is_grad_enabled()))
    model.register_forward_hook(lambda *_: reshard(True), always_call=True)


@torch.no_grad()
def _distribute(model: nn.Module, ranks: Ranks, weights: Mapping[str, Tensor] | None) -> None:
    """Fill the model with the first rank's weights."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        mine, mesh = parameter.to_local(), parameter.device_mesh
        copied = mesh.ndim > 1
        if not copied or mesh.get_local_rank("replicate") == 0:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=ranks.device)
            if weights is not None:
                whole.copy_(weights[name])
            mine.copy_(distribute_tensor(whole, mesh["shard"], parameter.placements[-1:]).to_local())
        if copied:
            dist.broadcast(mine, group=mesh.get_group("replicate"), group_src=0)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept:  # others are made from the configuration
            if weights is not None:
                buffer.copy_(weights[name])
            dist.broadcast(buffer, src=0)


def blocks(model: nn.Module, family: Family, dtype: torch.dtype | None) -> Iterator[Unit]:
    """A vision tower that is gathered as a whole, the blocks that are not in it, inner ones first, and the model."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if family.whole_tower and name.endswith(family.vision) and n_parameters(module) <= TOWER:
            inside = set(module.modules())
            yield module, dtype
            break
    names = frozenset(family.wrap_classes)
    found = (one for one in reversed(list(model.modules())) if type(one).__name__ in names and one not in inside)
    yield from ((module, dtype) for module in found)
    yield model, dtype


def n_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
