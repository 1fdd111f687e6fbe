"""Joining the processes of a trainer service, and splitting a model over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from components.contracts.errors import TrainerError
from components.training.logprobs import Policy
from components.training.processes import RENDEZVOUS
from components.training.ranks import Ranks
from components.training.service_settings import ServiceSettings

IDLE = timedelta(days=365)
"""Ranks wait for the next command as long as it takes; a rank that died is noticed by its parent, not by a timeout."""


@contextmanager
def joined(settings: ServiceSettings) -> Iterator[Ranks]:
    """This process as one of the ranks of a trainer service."""
    seed, patience = settings.policy.trainer.seed, settings.ready_timeout
    with joined_ranks(bool(settings.gpus), settings.threads, seed, patience) as ranks:
        yield ranks


@contextmanager
def joined_ranks(gpus: bool, threads: int, seed: int, patience: float = 600.0) -> Iterator[Ranks]:
    """This process as one of those that `components.training.processes` starts, seeded and deterministic on CPU.

    Args:
        gpus: each rank has the GPU of its number on this machine.
        threads: of torch on the CPU; 0 lets it choose.
        patience: seconds for all ranks to come.

    Raises:
        TrainerError: some do not.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.use_deterministic_algorithms(True)
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if size == 1:
        yield Ranks(device=device)
        return
    backends = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backends, store=_meeting(rank, size, patience), rank=rank, world_size=size, timeout=IDLE)
    try:
        yield Ranks(rank, size, device, dist.new_group(backend="gloo", timeout=IDLE))
    finally:
        dist.destroy_process_group()


def _meeting(rank: int, size: int, patience: float) -> dist.Store:
    """Where the ranks tell each other their addresses, once all of them are there."""
    store = dist.FileStore(os.environ[RENDEZVOUS], size)
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=patience))
    except RuntimeError as error:
        raise TrainerError(
            f"not all {size} processes were there after {patience:g} s",
            where=os.environ[RENDEZVOUS],
            remedy="start `armature join` on every other node; all must see this folder",
        ) from error
    return store


def sharder(ranks: Ranks, wrap_classes: Sequence[str], autocast: str) -> Callable[[Policy], None]:
    """What splits a policy over `ranks` with FSDP2, block by block; blocks are of `wrap_classes`."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    return partial(_shard, mesh=mesh, wrap_classes=frozenset(wrap_classes), autocast=autocast)


def _shard(policy: Policy, *, mesh: DeviceMesh, wrap_classes: frozenset[str], autocast: str) -> None:
    policy.float()
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if autocast == "bf16" else None, reduce_dtype=torch.float32
    )
    for module in reversed(list(policy.modules())):
        if type(module).__name__ in wrap_classes:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    # Resharded explicitly: by default the root stays whole after a forward pass without a backward, and then its
    # parameters are not those that the optimizer knows.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    register_fsdp_forward_method(policy, "next_tokens")
