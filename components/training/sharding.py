"""Sharding a model over ranks with FSDP2: weights, gradients and optimizer moments are fp32 and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from armature.components.families.family import Family
from armature.components.models.expert_parallel import split_experts
from armature.components.training.ranks import Ranks

Unit = tuple[nn.Module, torch.dtype | None]
"""A pair of a module, whose weights FSDP gathers together, and the dtype it computes in. None is its weights' dtype."""
Model = TypeVar("Model", bound=nn.Module)
TOWER = 2**30
"""Largest number of parameters with which a vision tower is gathered as a whole, and not block by block.

On a few images, a block of the tower computes for less time than the host needs to gather its weights.
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
    experts: bool = False,
) -> Callable[[Model], None]:
    """Return a function that shards a model over `ranks`, in place. The model's parameters may be on the meta device.

    Args:
        copies: number of copies of the model. With more than 1 (HSDP), the ranks are divided into `copies` blocks of
            neighbors, and each block shards one copy.
        units: returns the units of a model, inner ones first and the model itself last.
        weights: on the first rank all parameters and buffers by name, None on the other ranks. The first rank reads one
            at a time and sends each rank its shard.
        cast_inputs: also cast the inputs of a unit to its dtype.
        methods: names of methods of the model, besides `forward`, that use its weights. They gather the weights before
            they run.
        keep: keep weights gathered from a forward pass to its backward pass.
        experts: divide the experts of each layer among the ranks, which then do not gather them; with one copy only.
    """
    mesh = ranks.mesh(copies)

    def shard(model: Model) -> None:
        model.float()
        divided = split_experts(model, mesh) if experts else set[nn.Parameter]()
        for module, dtype in units(model):
            precision = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
            )
            # FSDP would leave the root module gathered after a forward pass. Without a backward pass after it, its
            # parameters would not be the sharded ones that the optimizer updates.
            fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=divided)
        for name in methods:
            register_fsdp_forward_method(model, name)
        if keep:
            _keep_for_backward(model)
        # `to_empty` would do this for parameters, but it would also discard the values of buffers.
        model._apply(lambda t: torch.empty_like(t, device=ranks.device) if t.is_meta else t.to(ranks.device))
        _distribute(model, ranks, weights)

    return shard


def _keep_for_backward(model: nn.Module) -> None:
    """Keep weights gathered after a forward pass only if a backward pass will follow, i.e. if gradients are enabled.

    FSDP's own setting, `reshard_after_forward=False`, would keep them after every forward pass.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def reshard(after_forward: bool) -> None:
        for module in sharded:
            module.set_reshard_after_forward(after_forward, recurse=False)

    model.register_forward_pre_hook(lambda *_: reshard(not torch.is_grad_enabled()))
    model.register_forward_hook(lambda *_: reshard(True), always_call=True)


@torch.no_grad()
def _distribute(model: nn.Module, ranks: Ranks, weights: Mapping[str, Tensor] | None) -> None:
    """Fill the parameters and buffers of the sharded `model` from `weights`, which only the first rank has."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        mine, mesh = parameter.to_local(), parameter.device_mesh
        copied = mesh.ndim > 1  # first scatter to the ranks of the first copy, which send their shards to the others
        if not copied or mesh.get_local_rank("replicate") == 0:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=ranks.device)
            if weights is not None:
                whole.copy_(weights[name])
            mine.copy_(distribute_tensor(whole, mesh["shard"], parameter.placements[-1:]).to_local())
        if copied:
            dist.broadcast(mine, group=mesh.get_group("replicate"), group_src=0)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:  # other buffers are computed from the configuration
            if weights is not None:
                buffer.copy_(weights[name])
            dist.broadcast(buffer, src=0)


def blocks(model: nn.Module, family: Family, dtype: torch.dtype | None) -> Iterator[Unit]:
    """Yield the units in which FSDP gathers a model's weights.

    These are the vision tower, if the family allows it and it is small enough; the transformer blocks outside of it,
    inner ones first; and the model itself for all other weights.
    """
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if family.whole_tower and name.endswith(family.vision) and n_parameters(module) <= TOWER:
            inside = set(module.modules())
            yield module, dtype
            break
    for module in reversed(layers(model, family)):
        if module not in inside:
            yield module, dtype
    yield model, dtype


def layers(model: nn.Module, family: Family) -> list[nn.Module]:
    """Return the modules of the family's `wrap_classes`, outer ones first.

    A checkpoint may have another language model than the family's, such as Mistral in LLaVA. Then its layers are those
    of the longest module list in it: without them FSDP would gather the whole language model at once.
    """
    wrapped = [module for module in model.modules() if type(module).__name__ in family.wrap_classes]
    language = [module for name, module in model.named_modules() if name.endswith(family.language)]
    inside = [module for part in language for module in part.modules()]
    if not set(inside).intersection(wrapped):
        lists = [list(module) for module in inside if isinstance(module, nn.ModuleList)]
        longest: list[nn.Module] = max(lists, key=len, default=[])
        wrapped += longest
    return wrapped


def n_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
