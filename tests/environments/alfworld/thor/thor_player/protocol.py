"""The player's protocol with ai2thor: fields in a pipe (release 5.0) or multipart posts (release 2.1)."""

from __future__ import annotations

import http.client
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

METADATA, ACTION, RGB, IDS, END = 1, 2, 4, 9, 255
HEADER = "!BI"


def rows_upwards(image: np.ndarray) -> bytes:
    """Return the image's bytes in Unity's order, the lowest row first."""
    return np.flipud(image).tobytes()


class Pipes:
    """The pipes of release 5.0. The player sends an answer first, and then one for each action."""

    def __init__(self) -> None:
        self.out = Path(os.environ["AI2THOR_FIFO_SERVER_PIPE_PATH"]).open("wb")  # noqa: SIM115
        self.incoming: Any = None

    def send(self, metadata: dict[str, Any], frame: np.ndarray, ids: np.ndarray | None) -> None:
        fields = [(METADATA, msgpack.packb(metadata)), (RGB, rows_upwards(frame))]
        if ids is not None:
            alpha = np.full((*ids.shape[:2], 1), 255, np.uint8)
            fields.append((IDS, rows_upwards(np.concatenate([ids, alpha], axis=2))))
        for kind, body in [*fields, (END, b"")]:
            self.out.write(struct.pack(HEADER, kind, len(body)) + body)
        self.out.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next action, or end the program if the other end of the pipe is closed."""
        if self.incoming is None:
            self.incoming = Path(os.environ["AI2THOR_FIFO_CLIENT_PIPE_PATH"]).open("rb")  # noqa: SIM115
        action: dict[str, Any] = {}
        while True:
            kind, size = struct.unpack(HEADER, self._read(struct.calcsize(HEADER)))
            body = self._read(size)
            if kind == END:
                return action
            if kind == ACTION:
                action = json.loads(body)

    def _read(self, size: int) -> bytes:
        data = self.incoming.read(size)
        if len(data) < size:
            sys.exit(0)
        return bytes(data)


class Posts:
    """The posts of release 2.1. Each answer is a post, whose response is the next action."""

    def __init__(self) -> None:
        self.action: dict[str, Any] = {}

    def send(self, metadata: dict[str, Any], frame: np.ndarray, ids: np.ndarray | None) -> None:
        parts = [('name="metadata"', "text/plain; charset=utf-8", json.dumps(metadata).encode())]
        parts.append(('name="token"', "text/plain; charset=utf-8", os.environ["AI2THOR_CLIENT_TOKEN"].encode()))
        parts.append(('name="image"; filename="image"', "image/raw", rows_upwards(frame)))
        if ids is not None:
            parts.append(('name="image_ids"; filename="ids"', "image/raw", rows_upwards(ids)))
        body = b""
        for disposition, media_type, content in parts:
            head = f"Content-disposition: form-data; {disposition}\r\nContent-Type: {media_type}"
            body += b"--part\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"
        body += b"--part--\r\n"
        connection = http.client.HTTPConnection(os.environ["AI2THOR_HOST"], int(os.environ["AI2THOR_PORT"]))
        connection.request("POST", "/train", body, {"Content-Type": "multipart/form-data; boundary=part"})
        answer = connection.getresponse().read()
        connection.close()
        self.action = json.loads(answer)

    def receive(self) -> dict[str, Any]:
        if "action" not in self.action:  # ai2thor ends the player with an empty action
            sys.exit(0)
        return self.action
