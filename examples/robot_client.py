"""A robot's side of `armature serve-policy`, without Armature: observations out, chunks of actions in.

`observe` and `act` stand for your robot. `python examples/robot_client.py ws://127.0.0.1:8000 "put the bowl away"`
takes the key from ARMATURE_POLICY_KEY and needs numpy, msgpack and websockets.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from websockets.sync.client import connect


def pack(array: Any) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def unpack(packed: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in packed:
        return packed
    return np.frombuffer(packed[b"data"], packed[b"dtype"]).reshape(packed[b"shape"])


def observe(fields: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Gray images and a robot at rest, with the names and shapes that the server asks for."""
    arrays = {name: field for name, field in fields.items() if "shape" in field and "optional" not in field}
    gray = {name: np.full([side or 224 for side in field["shape"]], 128, "uint8") for name, field in arrays.items()}
    rest = {name: np.zeros(field["shape"], "float32") for name, field in arrays.items() if field["dtype"] == "float32"}
    return {**gray, **rest, "prompt": task}


def act(action: Any) -> None:
    print(np.round(action, 3).tolist())


def main(url: str, task: str, chunks: int = 2) -> None:
    headers = {"Authorization": f"Api-Key {os.environ['ARMATURE_POLICY_KEY']}"}
    with connect(url, additional_headers=headers, compression=None, max_size=None) as server:
        metadata = msgpack.unpackb(server.recv())
        for _ in range(chunks):
            server.send(msgpack.packb(observe(metadata["observation"], task), default=pack))
            if isinstance(answer := server.recv(), str):
                raise SystemExit(answer)  # what is wrong with the observation
            for action in msgpack.unpackb(answer, object_hook=unpack)["actions"]:
                act(action)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
