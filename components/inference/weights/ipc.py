"""The trainer's side of CUDA IPC: servers on the same GPUs read its memory."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from components.inference.endpoint import Endpoint
from components.inference.weights.control import ServerControl
from components.inference.weights.parameters import Parameters, describe, whole


def send_ipc(endpoints: Sequence[Endpoint], parameters: Parameters, *, first: bool, timeout: float) -> None:
    """Send to all servers. Called on every rank; each rank serves the server ranks on its own GPU.

    Args:
        first: this is the first transfer to these servers.
        timeout: seconds for each call to a server.

    Raises:
        WeightSyncError: a server refused.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    kept = [whole(tensor) for tensor in parameters.values()]  # handles keep no memory alive, these do
    handles: list[dict[str, Any]] = [{gpu: reduce_tensor(tensor)[1]} for tensor in kept]
    torch.cuda.synchronize()
    if ranks > 1:
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, handles)
        handles = [{key: value for entry in of_all for key, value in entry.items()} for of_all in zip(*gathered)]  # noqa: B905
    if rank == 0:
        pickled = base64.b64encode(pickle.dumps(handles)).decode()
        update = {"update_info": describe(parameters) | {"ipc_handles_pickled": pickled}}
        with ServerControl(endpoints, timeout) as control:
            if first:
                control.post_all("/init_weight_transfer_engine", {"init_info": {}})
            control.post_all("/start_weight_update")
            control.post_all("/update_weights", update)
            control.post_all("/finish_weight_update")
    if ranks > 1:
        dist.barrier()
    del kept
    torch.cuda.ipc_collect()
