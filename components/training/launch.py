"""This process as one of those that train together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout  # there is no public way to change it

from armature.components.contracts.errors import TrainerError
from armature.components.models.context_parallel import ContextParallel
from armature.components.training.processes import RENDEZVOUS, TrainerProcesses
from armature.components.training.ranks import Ranks

CONNECT = timedelta(minutes=2)
"""All ranks are there when they connect to each other, so this is short, unlike the time for a collective."""
WATCHDOG = timedelta(minutes=1)
"""How much later NCCL ends a process that waits for a lost rank: what its host waits for says which rank that is."""


@contextmanager
def joined(processes: TrainerProcesses, seed: int) -> Iterator[Ranks]:
    """This process as one of those that `processes.start` starts, seeded and deterministic on CPU.

    Raises:
        TrainerError: some do not come, or cannot be reached.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if processes.gpus else torch.device("cpu")
    if processes.gpus:
        torch.cuda.set_device(device)
    else:
        torch.use_deterministic_algorithms(True)
    if processes.threads:
        torch.set_num_threads(processes.threads)
    torch.manual_seed(seed)
    if size == 1:
        yield Ranks(device=device)
        return
    backends = "cpu:gloo,cuda:nccl" if processes.gpus else "gloo"
    store = _meeting(rank, size, processes.ready_timeout)
    _connect(backends, store, rank, size)
    timeout = timedelta(seconds=processes.rank_timeout)
    _set_pg_timeout(timeout + WATCHDOG if processes.gpus else timeout)
    try:
        group = dist.new_group(backend="gloo", timeout=timeout)
        context = _context(rank, size, processes.context_parallel, timeout)
        yield Ranks(rank, size, device, group, timeout, context)
    finally:
        dist.destroy_process_group()


def _context(rank: int, size: int, sharing: int, timeout: timedelta) -> ContextParallel | None:
    """Neighbors share sequences."""
    if sharing == 1:
        return None
    groups = [dist.new_group(range(first, first + sharing), timeout=timeout) for first in range(0, size, sharing)]
    return ContextParallel(rank % sharing, sharing, groups[rank // sharing])


def _meeting(rank: int, size: int, patience: float) -> dist.Store:
    """Where the ranks tell each other their addresses, once all of them are there."""
    store = dist.FileStore(os.environ[RENDEZVOUS], size)
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=patience))
    except RuntimeError as error:
        raise TrainerError(
            f"not all {size} processes were there after {patience:g} s",
            code="nodes_missing",
            where=os.environ[RENDEZVOUS],
            remedy="look into the logs beside this folder, which all nodes must see under this path",
        ) from error
    return store


def _connect(backends: str, store: dist.Store, rank: int, size: int) -> None:
    try:
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=CONNECT)
    except RuntimeError as error:
        raise TrainerError(
            f"rank {rank} cannot connect to the other ones of {size}",
            code="ranks_not_connected",
            where=f"{socket.gethostname()}, interface {os.environ.get('GLOO_SOCKET_IFNAME')}: "
            f"{str(error).splitlines()[0]}",
            remedy="look for a firewall: nodes have to reach each other on every TCP port of that network",
        ) from error
