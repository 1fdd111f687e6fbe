"""The ranks: processes that train one model together, their collectives, and how a process becomes one of them."""

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
"""Number of elements of a bucket, in which small gradients are summed over ranks together.

This size needs few messages and little extra memory.
"""
ALONE_ELEMENTS = 2**22
"""A gradient with at least this many elements is summed by itself, without being copied into a bucket."""
CONNECT = timedelta(minutes=2)
"""Time limit for connecting the ranks. It is shorter than a collective's limit because all ranks have started."""
WATCHDOG = timedelta(minutes=1)
"""Extra time before NCCL's watchdog ends a process that waits for a lost rank.

The gloo call on the host times out first, and its error tells which rank is lost.
"""


@dataclass(frozen=True)
class Ranks:
    """This process as one of `size` processes that train one model together; `rank` is its number.

    `device` is where it computes. `group` is a gloo process group for small Python objects, None if there is one rank.
    `context` describes the ranks that share each sequence with this one (context parallelism); None if no sequence is
    shared.

    A rank that died is noticed by its parent process. A rank that is cut off from the network is noticed by the others
    after `timeout` in a collective.

    Example:
        >>> ranks = Ranks()  # one process, all collectives return at once
        >>> ranks.gather("hello"), ranks.sum({"tokens": 3.0})
        (['hello'], {'tokens': 3.0})
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None
    timeout: timedelta = TIMEOUT
    context: ContextParallel | None = None

    @property
    def first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def part(self) -> tuple[int, int]:
        """This rank's number among the ranks that share its sequences, and the number of these ranks."""
        return (0, 1) if self.context is None else (self.context.rank, self.context.size)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """The number of the part of a batch that this rank trains on, and the number of parts.

        Ranks that share sequences train on the same part.
        """
        _, sharing = self.part
        return self.rank // sharing, self.size // sharing

    def another_group(self) -> Ranks:
        """Return a copy of these ranks that has a new gloo group, for use in another thread.

        Messages of different groups cannot be mistaken for each other. Every rank calls it.
        """
        return self if self.size == 1 else replace(self, group=dist.new_group(backend="gloo", timeout=self.timeout))

    def mesh(self, copies: int) -> DeviceMesh:
        """Return a device mesh with one row per copy of the model; the ranks of a row shard it. Every rank calls it."""
        if copies == 1:
            return init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("shard",))
        shape = copies, self.size // copies
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():
            _set_pg_timeout(self.timeout, group)
        return mesh

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype | None = None) -> None:
        """Sum the gradients of unsharded parameters over the ranks. A missing gradient counts as zero.

        Args:
            dtype: dtype of the gradients; by default the dtype of their parameter.
        """
        if self.size == 1:
            return
        whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
        for parameter in whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        for bucket in _buckets([p.grad for p in whole if p.grad is not None]):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                with self._timeout_as_error():
                    dist.all_reduce(bucket[0])
                continue
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            with self._timeout_as_error():
                dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            views = [piece.view_as(gradient) for gradient, piece in zip(bucket, pieces, strict=True)]
            torch._foreach_copy_(bucket, views)

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start an in-place sum of a contiguous tensor over the ranks, and return a function that waits for it."""
        with self._timeout_as_error():
            work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def wait() -> None:
            with self._timeout_as_error():
                work.wait()

        return wait

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sum of each value over the ranks. All ranks must pass the same keys."""
        if self.size == 1:
            return dict(values)
        total = torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64)
        with self._timeout_as_error():
            dist.all_reduce(total, group=self.group)
        return dict(zip(sorted(values), total.tolist(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in their order, on every rank.

        A value consists of tensors, JSON types and containers of them. torch's own `all_gather_object` would unpickle
        whatever a peer sends; this loads data only, no code.
        """
        if self.size == 1:
            return [value]
        data = _packed(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._timeout_as_error():
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        longest = int(max(sizes))
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        with self._timeout_as_error():
            dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))), group=self.group)
        return [_unpacked(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    @contextmanager
    def _timeout_as_error(self) -> Iterator[None]:
        """Return a context that raises a `TrainerError` if a collective in it times out."""
        try:
            yield
        except RuntimeError as error:
            if not re.search("time.?out|timed out", str(error), re.IGNORECASE):
                raise
            raise TrainerError(
                f"rank {self.rank} waited {self.timeout.total_seconds():g} s for another of {self.size} ranks",
                code="rank_timeout",
                where=str(error).splitlines()[0],
                remedy="look for a node that is gone, hangs or has lost its network; if all nodes are healthy, raise "
                "machine.limits.rank_timeout",
            ) from error

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        return self.gather(value if self.first else None)[0]


def _packed(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on the CPU. If it is sharded, its shards are gathered, so every rank must call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of all `tensors` together, sharded ones included.

    Sharded tensors must have the same mesh and placements, and all ranks of the mesh must call this. The squares of all
    shards are summed with one collective. torch's `get_total_norm` makes one collective per tensor, which costs more
    host time than the collective itself.
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
    """Return the full tensor `value` with the dtype, device and sharding of `target`."""
    value = value.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        return distribute_tensor(value, target.device_mesh, target.placements)
    return value


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype into buckets of at most `BUCKET_ELEMENTS` elements.

    A large tensor is alone in its bucket.
    """
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


# --- Joining the other ranks ---


@contextmanager
def joined(processes: TrainerProcesses, seed: int) -> Iterator[Ranks]:
    """Connect this process, a rank that `processes.start` started, with the other ranks.

    It also sets the device, the number of threads and the seed, and makes torch deterministic on a CPU.

    Raises:
        TrainerError: some ranks do not start, or cannot be reached.
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
    """Return the block of `sharing` neighboring ranks that share sequences with `rank`; None if `sharing` is 1."""
    if sharing == 1:
        return None
    groups = [dist.new_group(range(first, first + sharing), timeout=timeout) for first in range(0, size, sharing)]
    return ContextParallel(rank % sharing, sharing, groups[rank // sharing])


def _meeting(rank: int, size: int, timeout_s: float) -> dist.Store:
    """Wait until all ranks have started, and return the store through which they exchange addresses."""
    store = dist.FileStore(os.environ[RENDEZVOUS], size)
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TrainerError(
            f"not all {size} ranks started within {timeout_s:g} s",
            code="nodes_missing",
            where=os.environ[RENDEZVOUS],
            remedy="read the logs beside this folder, and check that all nodes see the folder under this path",
        ) from error
    return store


def _connect(backends: str, store: dist.Store, rank: int, size: int) -> None:
    try:
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=CONNECT)
    except RuntimeError as error:
        raise TrainerError(
            f"rank {rank} of {size} cannot connect to the other ranks",
            code="ranks_not_connected",
            where=f"{socket.gethostname()}, interface {os.environ.get('GLOO_SOCKET_IFNAME')}: "
            f"{str(error).splitlines()[0]}",
            remedy="look for a firewall: nodes must reach each other on every TCP port of that network",
        ) from error
