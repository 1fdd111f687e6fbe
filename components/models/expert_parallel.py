"""Expert parallelism: each rank keeps some experts of every layer, and computes them for the tokens of all ranks.

FSDP would gather the experts of a layer on every rank, for each pass; here tokens travel instead. A rank sends and gets
each token once in a pass, whatever the number k of its experts. Exchanging only the tokens that another rank's experts
were chosen for would move up to k rows of a token, which is less from about k ranks on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.grouped import product
from armature.components.models.varlen import under_autocast

PARALLEL = "parallel"
"""Name under which these products are registered in transformers."""
WEIGHTS = ("gate_up_proj", "down_proj")


def split_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Divide the experts of each layer among the ranks of `mesh`, of one dimension, and return the new parameters.

    A parameter becomes a DTensor without values, on the device of the old one: rank r has its experts r n to r n + n,
    for n experts on each rank.

    Raises:
        ConfigurationError: the model has no experts, or their number is not a multiple of the number of ranks.
    """
    split = set[nn.Parameter]()
    for experts in _layers(model):
        count, ranks = len(experts.down_proj), mesh.size()
        if count % ranks:
            raise ConfigurationError(
                f"{count} experts cannot be divided evenly among {ranks} ranks",
                code="experts_not_divided",
                where="machine.trainer.processes, machine.trainer.nodes",
                remedy='take a number of ranks that divides it, or set machine.trainer.sharding = "full"',
            )
        experts.config._experts_implementation = PARALLEL
        for name in WEIGHTS:
            whole = getattr(experts, name)
            local = whole.data.new_empty((count // ranks, *whole.shape[1:]))
            mine = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(mine, requires_grad=whole.requires_grad))
            split.add(getattr(experts, name))
    if not split:
        raise ConfigurationError(
            "the model has no experts that could be divided among ranks",
            code="experts_missing",
            where='machine.trainer.sharding = "experts"',
            remedy='set machine.trainer.sharding = "full"',
        )
    return split


def _layers(model: nn.Module) -> list[Any]:
    """Return the modules that hold the experts of a layer in one tensor for each product, as transformers' do."""
    return [module for module in model.modules() if set(WEIGHTS) <= module._parameters.keys()]


@torch.compiler.disable
def parallel_products(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, shape and dtype of `hidden`.

    Every rank calls it for the same layers in the same order; their numbers of tokens may differ. Its twin is
    `armature.components.models.grouped.grouped_products` with all experts on one rank.

    Args:
        experts: has `gate_up_proj` (E, 2 I, D) and `down_proj` (E, D, I), divided by `split_experts`.
        hidden: (T, D).
        chosen: (T, k) integers, the experts of each token.
        weights: (T, k).
    """
    some: Any = experts
    mesh: DeviceMesh = some.down_proj.device_mesh
    group, tokens = mesh.get_group(), torch.tensor([len(hidden)], device=hidden.device)
    missing = (0, 0, 0, int(_gathered(tokens, group).max()) - len(hidden))
    everyone, shares = (_RowExchange.apply(pad(each, missing), group, True) for each in (hidden, weights))
    numbers = _gathered(pad(chosen, missing, value=-1), group).flatten()

    gate_up, down = under_autocast(*(_mine(getattr(some, name), hidden.dtype) for name in WEIGHTS))
    numbers = numbers - mesh.get_local_rank() * len(down)
    pairs = ((numbers >= 0) & (numbers < len(down))).nonzero().squeeze(1)  # of a token and an expert of this rank
    numbers, order = numbers[pairs].sort(stable=True)
    pairs = pairs[order]
    rows = pairs // chosen.shape[1]
    ends = torch.searchsorted(numbers, torch.arange(len(down), device=numbers.device), right=True, out_int32=True)
    x = _SomeRows.apply(everyone.to(down.dtype), rows)
    x = product(some._apply_gate(product(x, gate_up.mT, ends)), down.mT, ends)
    x = x * shares.flatten()[pairs, None]
    return _RowExchange.apply(_added(x, rows, len(everyone)).to(hidden.dtype), group, False)[: len(hidden)]


def _mine(parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """Return this rank's experts in `dtype`. Their gradient becomes the mean over ranks, as FSDP's gradients are."""
    local = parameter.to_local()
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / parameter.device_mesh.size())
    return local.to(dtype)


def _added(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Add each of `values` (n, D) to the row of a matrix (count, D) that `rows` (n,) names, in fp32 or more."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.new_zeros((count, values.shape[1]), dtype=dtype).index_add(0, rows, values.to(dtype))


def _gathered(x: Tensor, group: Any) -> Tensor:
    """Return the rows of all ranks in the order of the ranks. Every rank has the same number of rows."""
    out = x.new_empty((len(x) * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _summed(x: Tensor, group: Any) -> Tensor:
    """Sum rows over the ranks, and return the part of this rank. It is the transpose of `_gathered`."""
    out = x.new_empty((len(x) // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _RowExchange(torch.autograd.Function):
    """`_gathered` or `_summed`. Each of the two computes the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, gather: bool) -> Tensor:
        ctx.group, ctx.back = group, _summed if gather else _gathered
        return _gathered(x, group) if gather else _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient, ctx.group), None, None


class _SomeRows(torch.autograd.Function):
    """Rows of `x` (T, D), some of them several times. Their gradients are added in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _added(gradient, ctx.saved_tensors[0], ctx.count).to(gradient.dtype), None


ALL_EXPERTS_FUNCTIONS.register(PARALLEL, parallel_products)
