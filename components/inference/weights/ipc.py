"""The trainer's side of CUDA IPC: servers on the same GPUs read its memory."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from armature.components.inference.endpoint import Endpoint
from armature.components.inference.weights.control import Packing, ServerControl
from armature.components.inference.weights.parameters import (
    Parameters,
    aligned,
    buckets,
    describe,
    largest,
    pack,
    size,
    whole,
)


class IpcSender:
    """Hands handles of its own GPU memory to the servers; see `WeightSender`.

    Each rank serves the server ranks on its own GPU, so it gathers every sharded tensor.
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
            said = [self._packing]
            dist.broadcast_object_list(said)
            self._packing = said[0]

    def send(self, parameters: Parameters) -> None:
        """See `WeightSender.send`."""
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if self._packing:
            self._send_packed(aligned(parameters), gpu)
        else:
            self._send_single(parameters, gpu)
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """See `WeightSender.close`; nothing is connected between two calls of `send`."""

    def _send_packed(self, parameters: Parameters, gpu: str) -> None:
        """Bucket after bucket through one buffer, which servers copy before they answer."""
        buffer = torch.empty(largest(parameters), dtype=torch.uint8, device="cuda")
        with ServerControl(self.endpoints if self._first else (), self._timeout) as control:
            control.post_all("/start_weight_update")
            for bucket in buckets(parameters):
                pack(bucket, buffer)
                # Each bucket is an export of its own: servers release one each.
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
        kept = [whole(tensor) for tensor in parameters.values()]  # handles keep no memory alive, these do
        handles = self._handles_of_all_ranks([{gpu: reduce_tensor(tensor)[1]} for tensor in kept])
        torch.cuda.synchronize()
        if self._first:
            update = {"update_info": describe(parameters) | {"ipc_handles_pickled": _pickled(handles)}}
            with ServerControl(self.endpoints, self._timeout) as control:
                control.post_all("/start_weight_update")
                control.post_all("/update_weights", update)
                control.post_all("/finish_weight_update")
        self._wait_for_ranks()
        del kept

    def _wait_for_ranks(self) -> None:
        if self._ranks > 1:
            dist.barrier()

    def _handles_of_all_ranks(self, handles: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One dictionary for each tensor, from GPU to handle."""
        if self._ranks == 1:
            return handles
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, handles)
        return [
            {gpu: handle for entry in of_all for gpu, handle in entry.items()} for of_all in zip(*gathered, strict=True)
        ]


def _pickled(handles: Any) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode()
