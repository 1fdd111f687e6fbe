"""The trainer's side of weight transfers between GPUs: NCCL and CUDA IPC."""

from __future__ import annotations

import base64
import ctypes
import pickle
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor

from armature.components.contracts.errors import WeightSyncError
from armature.components.inference.replies import BadReply, Endpoint, Reply, exchange_blocking

# --- vLLM's weight-transfer routes (0.26 and newer), called on all servers at once ---

Packing = Literal["init", "update"] | None
"""The vLLM route whose request turns on packing: many tensors are sent in one buffer. None: no packing, tensors are
sent one after the other."""
_PACKING: dict[str, Packing] = {"0.26.": "update", "0.32.": "init"}
"""The route that turns on packing, by the beginning of vLLM's version. vLLM moved the option from "update" to "init".
Tensors for servers of other versions are not packed."""


class ServerControl:
    """A client that posts to every endpoint in parallel. Calls return futures that raise WeightSyncError."""

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float) -> None:
        self.endpoints, self._timeout = list(endpoints), timeout
        self._http = httpx.Client(timeout=timeout, trust_env=False)
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(self.endpoints)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def close(self, wait: bool = False) -> None:
        """Close the client. If `wait` is true, wait for the end of calls in flight."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
        self._http.close()

    def world_sizes(self) -> list[int]:
        """Return the number of GPUs of each server."""
        sizes = []
        for endpoint in self.endpoints:
            reply = self._exchange("GET", endpoint, "/get_world_size")
            size = reply.document.get("world_size")
            if type(size) is not int or size < 1:
                raise WeightSyncError(
                    f"/get_world_size answered {reply.text}", code="invalid_world_size", where=endpoint.url
                )
            sizes.append(size)
        return sizes

    def packing(self) -> Packing:
        """Return the vLLM route that turns on packing. Return None unless all servers have it on the same route."""
        routes = set()
        for endpoint in self.endpoints:
            version = str(self._exchange("GET", endpoint, "/version").document.get("version"))
            routes.add(next((route for prefix, route in _PACKING.items() if version.startswith(prefix)), None))
        return routes.pop() if len(routes) == 1 else None

    def post(self, path: str, bodies: Sequence[Any]) -> list[Future[None]]:
        """Post `bodies[i]` to endpoint i, to all endpoints in parallel. Return one future per endpoint."""
        return [
            self._threads.submit(self._post, endpoint, path, body)
            for endpoint, body in zip(self.endpoints, bodies, strict=True)
        ]

    def post_all(self, path: str, body: Any = None) -> None:
        """Post the same body to all endpoints and wait for all answers."""
        for future in self.post(path, [body] * len(self.endpoints)):
            future.result()

    def _post(self, endpoint: Endpoint, path: str, body: Any) -> None:
        self._exchange("POST", endpoint, path, body)

    def _exchange(self, method: str, endpoint: Endpoint, path: str, body: Any = None) -> Reply:
        url = f"{endpoint.url}{path}"
        try:
            reply = exchange_blocking(self._http, method, url, endpoint.headers, self._timeout, body)
        except (httpx.TransportError, BadReply) as error:
            raise WeightSyncError(
                f"{path}: {error!r}", code="sync_connection_lost", where=endpoint.url, remedy="read the server's log"
            ) from error
        if reply.status != 200:
            raise WeightSyncError(
                f"{path} answered {reply.status}: {reply.text}",
                code="server_refuses_weights",
                where=endpoint.url,
                remedy="read the server's log",
            )
        return reply


# --- The trainer's parameters in the form that servers expect ---

Parameters = Mapping[str, torch.Tensor]
"""Tensors on this rank's GPU by checkpoint name; sharded tensors are DTensors. All ranks have the same order."""

BUCKET = 2**30
"""Size limit of a bucket of tensors in bytes. A bucket ends with the first tensor that makes it larger than this."""


def describe(parameters: Parameters) -> dict[str, Any]:
    """Return the parameters' names, dtypes and unsharded shapes, in the JSON form that vLLM's update routes expect."""
    return {
        "names": list(parameters),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in parameters.values()],
        "shapes": [list(tensor.shape) for tensor in parameters.values()],
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor, contiguous. For a DTensor this is a collective operation."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def aligned(parameters: Parameters) -> Parameters:
    """Sort parameters by element size, largest first, so that each is aligned when they are concatenated as bytes."""
    return dict(sorted(parameters.items(), key=lambda item: -item[1].element_size()))


def size(tensor: torch.Tensor) -> int:
    """Return the size of the unsharded tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def buckets(parameters: Parameters, most: int = BUCKET) -> Iterator[Parameters]:
    """Split parameters, in order, into buckets, each of which is sent as a whole. As in vLLM, a bucket ends with the
    first tensor that makes it larger than `most` bytes."""
    bucket: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in parameters.items():
        bucket[name] = tensor
        held += size(tensor)
        if held > most:
            yield bucket
            bucket, held = {}, 0
    if bucket:
        yield bucket


def pack(bucket: Parameters, buffer: torch.Tensor) -> torch.Tensor:
    """Write the bytes of the bucket's unsharded tensors, one after the other, to the start of `buffer` (uint8). Return
    the written part of `buffer`. For DTensors this is a collective operation."""
    flat = [whole(tensor).view(-1).view(torch.uint8) for tensor in bucket.values()]
    return torch.cat(flat, out=buffer[: sum(map(len, flat))])


def largest(parameters: Parameters, most: int = BUCKET) -> int:
    """Return the size in bytes of the largest bucket that `buckets` makes of the parameters."""
    return max(sum(map(size, bucket.values())) for bucket in buckets(parameters, most))


class IpcSender:
    """Send handles of this rank's GPU memory to servers on the same GPUs, by CUDA IPC; see `WeightSender`.

    Each trainer rank provides the weights for the server ranks on its own GPU, so it gathers every sharded tensor.
    """

    def __init__(self, endpoints: Sequence[Endpoint], timeout: float) -> None:
        self.endpoints, self._timeout = endpoints, timeout
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._first = self._ranks == 1 or dist.get_rank() == 0
        self._packing: Packing = None
        if self._first:
            with ServerControl(endpoints, timeout) as control:
                self._packing = control.packing()
                packed = {"packed": True} if self._packing == "init" else {}
                control.post_all("/init_weight_transfer_engine", {"init_info": packed})
        if self._ranks > 1:
            packing = [self._packing]
            dist.broadcast_object_list(packing)
            self._packing = packing[0]

    def send(self, parameters: Parameters) -> None:
        """Send the parameters to all servers; see `WeightSender.send`."""
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if self._packing:
            self._send_packed(aligned(parameters), gpu)
        else:
            self._send_single(parameters, gpu)
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """Do nothing, because no connection is open between two calls of `send`; see `WeightSender.close`."""

    def _send_packed(self, parameters: Parameters, gpu: str) -> None:
        """Send one bucket of tensors after the other through the same GPU buffer. Servers copy it before they
        answer."""
        buffer = torch.empty(largest(parameters), dtype=torch.uint8, device="cuda")
        with ServerControl(self.endpoints if self._first else (), self._timeout) as control:
            control.post_all("/start_weight_update")
            for bucket in buckets(parameters):
                pack(bucket, buffer)
                # Export the buffer again for each bucket: servers release one export per update.
                (handle,) = self._handles_of_all_ranks([{gpu: reduce_tensor(buffer)[1]}])
                torch.cuda.synchronize()
                update = describe(bucket) | {
                    "ipc_handles_pickled": _pickled(handle),
                    "tensor_sizes": [size(tensor) for tensor in bucket.values()],
                }
                if self._packing == "update":
                    update["packed"] = True
                control.post_all("/update_weights", {"update_info": update})
                self._wait_for_ranks()
            control.post_all("/finish_weight_update")

    def _send_single(self, parameters: Parameters, gpu: str) -> None:
        # The IPC handles do not keep the memory alive; these tensors do.
        tensors = [whole(tensor) for tensor in parameters.values()]
        handles = self._handles_of_all_ranks([{gpu: reduce_tensor(tensor)[1]} for tensor in tensors])
        torch.cuda.synchronize()
        if self._first:
            update = {"update_info": describe(parameters) | {"ipc_handles_pickled": _pickled(handles)}}
            with ServerControl(self.endpoints, self._timeout) as control:
                control.post_all("/start_weight_update")
                control.post_all("/update_weights", update)
                control.post_all("/finish_weight_update")
        self._wait_for_ranks()
        del tensors

    def _wait_for_ranks(self) -> None:
        if self._ranks > 1:
            dist.barrier()

    def _handles_of_all_ranks(self, handles: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Gather the IPC handles of all ranks. Return one dictionary per tensor, which maps the id of each GPU to the
        handle of the tensor's copy there."""
        if self._ranks == 1:
            return handles
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, handles)
        return [
            {gpu: handle for entry in of_all for gpu, handle in entry.items()} for of_all in zip(*gathered, strict=True)
        ]


def _pickled(handles: Any) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode()


# --- NCCL: rank 0 broadcasts to the GPUs of all servers ---
#
# The trainer does not need vLLM: the rendezvous and the few NCCL calls that vLLM's workers expect are made here.
# Workers join the trainer's TCP store, read a pickled `ncclUniqueId` under the key "broadcast_from/0/0", and begin with
# an all-reduce of one float (vLLM 0.26 to 0.32).

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
    """Connect rank 0 with every GPU of every server, and broadcast weights by NCCL; see `WeightSender`.

    The other ranks only help to gather sharded tensors. The members of an NCCL group never change. When the servers
    change, a new sender makes a new group, and the workers of remaining servers leave the old group.

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
        """Send the parameters to all servers; see `WeightSender.send`."""
        parameters = aligned(parameters)
        if not self._first:
            for tensor in parameters.values():
                whole(tensor)
            return
        self._control.post_all("/start_weight_update")
        info = describe(parameters) | ({"packed": True, **_GEOMETRY} if self._packing == "update" else {})
        updates = self._control.post("/update_weights", [{"update_info": info}] * len(self._control.endpoints))
        deadline = time.monotonic() + self._timeout
        for data in self._pieces(parameters):  # `data` keeps the tensor alive until the GPU is done with it
            self._call("ncclBroadcast", data, 0)
            self._finish(updates, deadline)
        for update in updates:
            update.result(max(0.0, deadline - time.monotonic()))
        self._control.post_all("/finish_weight_update")

    def close(self) -> None:
        """Leave the NCCL group and close the HTTP connections; see `WeightSender.close`."""
        if self._comm is not None:
            self._nccl.ncclCommAbort(self._comm)  # ncclCommDestroy would wait for ranks that may be gone
            self._comm = None
        self._store = None
        if self._first:
            self._control.close()

    def _pieces(self, parameters: Parameters) -> Iterator[torch.Tensor]:
        """Yield the tensors to broadcast, in order: packed buckets if servers support packing, else the parameters."""
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
        self._store.set("broadcast_from/0/0", _pickled_id(unique))  # type: ignore[arg-type]
        deadline = time.monotonic() + self._timeout
        self._meet(world, unique, joining, deadline)
        one = torch.zeros(1, device="cuda")
        self._call("ncclAllReduce", one, _SUM)
        self._finish(joining, deadline)
        for join in joining:
            join.result(max(0.0, deadline - time.monotonic()))

    def _meet(self, world: int, unique: _UniqueId, joining: Sequence[Future[None]], deadline: float) -> None:
        """Create the NCCL communicator of `world` ranks, in a thread. NCCL waits forever for a missing rank; the thread
        is then abandoned and WeightSyncError is raised."""
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
        """Run the NCCL function `name` on `data`, in place, on the current CUDA stream. `argument` is the root rank of
        a broadcast, or the operation of a reduction."""
        pointer = ctypes.c_void_p(data.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        function = getattr(self._nccl, name)
        count, kind = ctypes.c_size_t(data.numel()), _NCCL_TYPES[data.dtype]
        self._check(function(pointer, pointer, count, kind, argument, self._comm, stream))

    def _finish(self, calls: Sequence[Future[None]], deadline: float) -> None:
        """Wait until the GPU has finished the collective. Raise WeightSyncError if one of the `calls` to servers fails
        meanwhile: if a server is lost, the collective hangs until `close`."""
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            self._refuse_lost(calls, deadline)
            time.sleep(0.0005)

    def _refuse_lost(self, calls: Sequence[Future[None]], deadline: float) -> None:
        """Check that the calls to servers have not failed so far, and that there is still time.

        Raises:
            WeightSyncError: a call failed, or the deadline has passed.
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
    """Return the IP address that this host uses for connections to `url`. Nothing is sent."""
    target = httpx.URL(url)
    family, kind, _, _, where = socket.getaddrinfo(target.host, target.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _pickled_id(unique: _UniqueId) -> bytes:
    """Pickle a unique id as an object of vLLM's class `ncclUniqueId`, which cannot be imported here."""
    theirs = b"vllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    make = pickle.GLOBAL + b"_ctypes\n_unpickle\n" + pickle.GLOBAL + theirs
    state = pickle.EMPTY_DICT + pickle.SHORT_BINBYTES + bytes([128]) + bytes(unique) + pickle.TUPLE2
    return pickle.PROTO + b"\x04" + make + state + pickle.TUPLE2 + pickle.REDUCE + pickle.STOP
