"""The trainer's side of NCCL: rank 0 broadcasts to the GPUs of all servers.

vLLM need not be installed beside the trainer: the rendezvous and the few NCCL calls that its workers expect are
made here. Workers join a TCP store of ours, read a pickled `ncclUniqueId` under the key "broadcast_from/0/0",
and begin with an all-reduce of one float (vLLM 0.26 to 0.32).
"""

from __future__ import annotations

import ctypes
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread

import httpx
import torch
import torch.distributed as dist

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.weights.control import ServerControl
from armature.components.inference.weights.parameters import (
    BUCKET,
    Parameters,
    aligned,
    buckets,
    describe,
    largest,
    pack,
    whole,
)

_SUM = 0
_GEOMETRY = {"packed_buffer_size_bytes": BUCKET, "packed_num_buffers": 2}
_NCCL_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class NcclSender:
    """Connects rank 0 with every GPU of every server, and then sends as often as wanted; see `WeightSender`.

    The other ranks only take part in gathering sharded tensors. NCCL's groups never change: for other servers another
    sender is made, and the workers of those that stay leave the old group for the new one.

    Raises:
        WeightSyncError: a server does not join.
    """

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float) -> None:
        self.endpoints, self._timeout = endpoints, timeout
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        self._comm: ctypes.c_void_p | None = None
        self._store: dist.TCPStore | None = None
        if self._first:
            self._control = ServerControl(endpoints, timeout)
            try:
                self._connect(own_address(endpoints[0].url))
            except BaseException:
                self.close()
                raise

    def send(self, parameters: Parameters) -> None:
        """See `WeightSender.send`."""
        parameters = aligned(parameters)
        if not self._first:
            for tensor in parameters.values():
                whole(tensor)
            return
        self._control.post_all("/start_weight_update")
        told = describe(parameters) | ({"packed": True, **_GEOMETRY} if self._packing == "update" else {})
        updates = self._control.post("/update_weights", [{"update_info": told}] * len(self._control.endpoints))
        deadline = time.monotonic() + self._timeout
        for data in self._pieces(parameters):  # kept until the GPU is done with it
            self._call("ncclBroadcast", data, 0)
            self._finish(updates, deadline)
        for update in updates:
            update.result(max(0.0, deadline - time.monotonic()))
        self._control.post_all("/finish_weight_update")

    def close(self) -> None:
        """See `WeightSender.close`."""
        if self._comm is not None:
            self._nccl.ncclCommAbort(self._comm)  # ncclCommDestroy would wait for ranks that may be gone
            self._comm = None
        self._store = None
        if self._first:
            self._control.close()

    def _pieces(self, parameters: Parameters) -> Iterator[torch.Tensor]:
        """What is broadcast, one after the other."""
        if self._packing:
            buffer = torch.empty(largest(parameters), dtype=torch.uint8, device="cuda")
            yield from (pack(bucket, buffer) for bucket in buckets(parameters))
        else:
            yield from map(whole, parameters.values())

    def _connect(self, address: str) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")
        unique = _UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        sizes = self._control.world_sizes()
        self._packing = self._control.packing()
        packed = {"packed": True, **_GEOMETRY} if self._packing == "init" else {}
        world = 1 + sum(sizes)
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        infos = [
            {
                "init_info": {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": 1 + sum(sizes[:index]),
                    "world_size": world,
                }
                | packed
            }
            for index in range(len(sizes))
        ]
        joining = self._control.post("/init_weight_transfer_engine", infos)
        self._store = dist.TCPStore(
            address,
            port,
            world,
            is_master=True,
            timeout=timedelta(seconds=self._timeout),
            master_listen_fd=listener.detach(),
            use_libuv=False,
            wait_for_workers=False,
        )
        self._store.set("broadcast_from/0/0", _pickled(unique))  # type: ignore[arg-type]
        deadline = time.monotonic() + self._timeout
        self._meet(world, unique, joining, deadline)
        one = torch.zeros(1, device="cuda")
        self._call("ncclAllReduce", one, _SUM)
        self._finish(joining, deadline)
        for join in joining:
            join.result(max(0.0, deadline - time.monotonic()))

    def _meet(self, world: int, unique: _UniqueId, joining: Sequence[Future[None]], deadline: float) -> None:
        """Make the communicator. NCCL waits for every rank without end: where one is gone, its thread stays behind."""
        comm, codes, device = ctypes.c_void_p(), list[int](), torch.cuda.current_device()

        def meet() -> None:
            torch.cuda.set_device(device)
            codes.append(self._nccl.ncclCommInitRank(ctypes.byref(comm), world, unique, 0))

        meeting = Thread(target=meet, daemon=True)
        meeting.start()
        while meeting.is_alive():
            self._refuse_lost(joining, deadline)
            meeting.join(0.01)
        self._check(codes[0])
        self._comm = comm

    def _call(self, name: str, data: torch.Tensor, argument: int) -> None:
        """A collective in place on the current stream; `argument` is the root or the operation."""
        pointer = ctypes.c_void_p(data.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        function = getattr(self._nccl, name)
        count, kind = ctypes.c_size_t(data.numel()), _NCCL_TYPES[data.dtype]
        self._check(function(pointer, pointer, count, kind, argument, self._comm, stream))

    def _finish(self, calls: Sequence[Future[None]], deadline: float) -> None:
        """Wait for the GPU, but no longer than the servers take part: a lost peer hangs a collective until `close`."""
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            self._refuse_lost(calls, deadline)
            time.sleep(0.0005)

    def _refuse_lost(self, calls: Sequence[Future[None]], deadline: float) -> None:
        """
        Raises:
            WeightSyncError: one of the calls failed, or the deadline has passed.
        """
        for call in calls:
            if call.done():
                call.result()
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"the servers did not receive the weights in {self._timeout:g} s", code="sync_timeout"
            )

    def _check(self, code: int) -> None:
        if code != 0:
            self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
            raise WeightSyncError(f"NCCL: {self._nccl.ncclGetErrorString(code).decode()}", code="nccl_failed")


def own_address(url: str) -> str:
    """The address of this host on the way to `url`. Nothing is sent."""
    target = httpx.URL(url)
    family, kind, _, _, where = socket.getaddrinfo(target.host, target.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _pickled(unique: _UniqueId) -> bytes:
    """What `pickle` makes of the workers' own class of unique ids, which is not importable here."""
    theirs = b"vllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    make = pickle.GLOBAL + b"_ctypes\n_unpickle\n" + pickle.GLOBAL + theirs
    state = pickle.EMPTY_DICT + pickle.SHORT_BINBYTES + bytes([128]) + bytes(unique) + pickle.TUPLE2
    return pickle.PROTO + b"\x04" + make + state + pickle.TUPLE2 + pickle.REDUCE + pickle.STOP
