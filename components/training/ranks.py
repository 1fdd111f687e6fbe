"""The processes that train together, and the few collectives that they need."""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout  # there is no public way to change it
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.nn.utils import get_total_norm

from armature.components.contracts.errors import TrainerError
from armature.components.models.context_parallel import ContextParallel
from armature.components.training.processes import RENDEZVOUS, TrainerProcesses

TIMEOUT = timedelta(minutes=30)
BUCKET_ELEMENTS = 16 * 2**20
"""Gradients are summed over ranks in pieces of this size: few messages, little extra memory."""
ALONE_ELEMENTS = 2**22
"""A gradient that is as large is a piece by itself, and not copied."""


@dataclass(frozen=True)
class Ranks:
    """This process among `size` that hold the same model. `device` is where it computes.

    `group` is a gloo group for small Python objects; None when there is one rank. A rank that died is noticed by its
    parent; one that is cut off, by the others when it did not answer for `timeout`. `context`: those of the ranks that
    share each sequence with this one; None: it has all of its own.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None
    timeout: timedelta = TIMEOUT
    context: ContextParallel | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """Which of how many ranks that share a sequence this one is."""
        return (0, 1) if self.context is None else (self.context.rank, self.context.size)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Which of how many parts of a batch is this rank's."""
        _, sharing = self.part
        return self.rank // sharing, self.size // sharing

    def another_group(self) -> Ranks:
        """The same ranks with a group of their own, for a thread: what it sends cannot meet what others send."""
        return self if self.size == 1 else replace(self, group=dist.new_group(backend="gloo", timeout=self.timeout))

    def mesh(self, copies: int) -> DeviceMesh:
        """The ranks in `copies` rows, each of which holds the model in shards. Every rank calls it."""
        if copies == 1:
            return init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("shard",))
        shape = copies, self.size // copies
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():
            _set_pg_timeout(self.timeout, group)
        return mesh

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype | None = None) -> None:
        """Add up the gradients of whole (not sharded) parameters over the ranks; a missing one counts as zero.

        Args:
            dtype: of the gradients; None: that of their parameter.
        """
        if self.size == 1:
            return
        whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        for parameter in whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        for bucket in _buckets([p.grad for p in whole if p.grad is not None]):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                with self._awaited():
                    dist.all_reduce(bucket[0])
                continue
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            with self._awaited():
                dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            views = [piece.view_as(gradient) for gradient, piece in zip(bucket, pieces, strict=True)]
            torch._foreach_copy_(bucket, views)

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start an in-place sum of a contiguous tensor over the ranks. Returns a function that waits for it."""
        with self._awaited():
            work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def wait() -> None:
            with self._awaited():
                work.wait()

        return wait

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over the ranks; all ranks have the same keys."""
        if self.size == 1:
            return dict(values)
        total = torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64)
        with self._awaited():
            dist.all_reduce(total, group=self.group)
        return dict(zip(sorted(values), total.tolist(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, on every rank: tensors, and what JSON knows, in containers.

        torch's own collectives of objects would unpickle whatever a peer sends; this reads nothing but data.
        """
        if self.size == 1:
            return [value]
        own = _packed(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._awaited():
            dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
        longest = int(max(sizes))
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        with self._awaited():
            dist.all_gather(parts, torch.nn.functional.pad(own, (0, longest - len(own))), group=self.group)
        return [_unpacked(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """
        Raises:
            TrainerError: a rank did not answer within `timeout`.
        """
        try:
            yield
        except RuntimeError as error:
            if not re.search("time.?out|timed out", str(error), re.IGNORECASE):
                raise
            raise TrainerError(
                f"rank {self.rank} waited {self.timeout.total_seconds():g} s for another one of {self.size}",
                code="rank_timeout",
                where=str(error).splitlines()[0],
                remedy="look for a node that is gone, hangs or lost its network; if all are well, raise "
                "machine.rank_timeout",
            ) from error

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.gather(value if self.first else None)[0]


def _packed(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU, of a sharded one as well (then every rank must call)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all `tensors` together; of shards, which lie alike, over the ranks that have them: all of these call.

    torch's own `get_total_norm` asks for each shard by itself, which takes a host longer than the collective.
    """
    whole, sharded = list[Tensor](), list[DTensor]()
    for tensor in tensors:
        sharded.append(tensor) if isinstance(tensor, DTensor) else whole.append(tensor)
    norm = get_total_norm(whole)
    if sharded:
        square = get_total_norm([tensor.to_local() for tensor in sharded]).square()
        placements = [Partial() if one.is_shard() else one for one in sharded[0].placements]
        shared = DTensor.from_local(square, sharded[0].device_mesh, placements, run_check=False).full_tensor()
        norm = (norm.to(shared.device).square() + shared).sqrt()
    return float(norm)


def like(value: Tensor, target: Tensor) -> Tensor:
    """`value`, a full tensor, in the dtype, on the device and in the shards of `target`."""
    value = value.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        return distribute_tensor(value, target.device_mesh, target.placements)
    return value


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        for tensor in same:
            if tensor.numel() >= ALONE_ELEMENTS:
                yield [tensor]
                continue
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS:
                yield bucket
                bucket = []
            bucket.append(tensor)
        if bucket:
            yield bucket


# This process as one of those that train together.

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
