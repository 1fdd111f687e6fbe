"""ai2thor's pipes to its player, made robust against a player that dies, hangs or sends invalid data.

ai2thor's own server opens both pipes without a timeout, so it waits forever for a player that never starts. If a
player has died, that server reads the end of the pipe again and again, at full speed, until the time limit.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from io import FileIO
from typing import Any

from ai2thor.fifo_server import FifoServer
from ai2thor.server import Event

from armature.components.environments.alfworld.thor.metadata import PlayerError, PlayerMetadata

MOST_BYTES = 256 * 2**20
"""Largest number of bytes in one answer; a frame of 4096 x 4096 pixels with its segmentation takes half of it."""

_POLL = 0.2
_CHUNK = 2**20


class PlayerServer(FifoServer):
    """A server whose every failure is a `PlayerError`, raised within `timeout` seconds after an action was sent."""

    server_pipe: FileIO | None
    client_pipe: FileIO | None

    def receive(self, timeout: float | None = None) -> Event:
        self._until = time.monotonic() + (self.timeout if timeout is None else timeout)
        self._left = MOST_BYTES
        if self.server_pipe is None:
            self.server_pipe = FileIO(os.open(self.server_pipe_path, os.O_RDONLY | os.O_NONBLOCK), "rb")
        try:
            return super().receive(timeout)
        except PlayerError:
            raise
        except Exception as error:  # ai2thor parses the player's bytes without checks, so anything may be raised
            raise PlayerError(
                f"the answer of AI2-THOR's player cannot be read: {type(error).__name__}: {str(error)[:500]}",
                code="player_answer_unreadable",
                remedy="check that the player's release is the one in the setting `player`",
            ) from error

    def create_event(self, metadata: Mapping[str, Any], files: Mapping[str, list[bytes]]) -> Event:
        (agent,) = PlayerMetadata.model_validate(metadata).agents
        pixels = agent.screenWidth * agent.screenHeight
        for body in [*files.get("image", []), *files.get("image_ids", [])]:
            if len(body) not in (3 * pixels, 4 * pixels):
                raise ValueError(f"an image of {agent.screenWidth}x{agent.screenHeight} pixels has {len(body)} bytes")
        return super().create_event(metadata, files)

    def _read_with_timeout(self, server_pipe: FileIO, message_size: int, timeout: float | None) -> bytes:
        self._left -= message_size
        if self._left < 0:
            raise PlayerError(
                f"AI2-THOR's player announces an answer of more than {MOST_BYTES} bytes", code="player_answer_too_large"
            )
        parts = []
        while message_size:
            self._wait(server_pipe.fileno(), select.POLLIN, "answer")
            try:
                part = os.read(server_pipe.fileno(), min(message_size, _CHUNK))
            except BlockingIOError:
                continue
            if not part:
                raise self._ended()
            parts.append(part)
            message_size -= len(part)
        return b"".join(parts)

    def _send_message(self, message_type: int, body: bytes) -> None:
        self._until = time.monotonic() + self.timeout
        self._last_action_message = body
        if self.client_pipe is None:
            self.client_pipe = FileIO(self._open_to_write(), "wb")
        message = memoryview(self._create_header(message_type, body) + body + self.eom_header)
        try:
            while message:
                self._wait(self.client_pipe.fileno(), select.POLLOUT, "read the action")
                message = message[os.write(self.client_pipe.fileno(), message[: select.PIPE_BUF]) :]
        except BrokenPipeError:
            raise self._ended() from None

    def _open_to_write(self) -> int:
        while True:
            try:
                return os.open(self.client_pipe_path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:  # ENXIO: the player has not opened the pipe yet
                self._check_player("read actions")
                if time.monotonic() + 0.01 > self._until:
                    raise self._late("read actions") from error
                time.sleep(0.01)

    def _wait(self, descriptor: int, event: int, what: str) -> None:
        """Wait until `descriptor` is ready or the other end of the pipe is closed.

        Raises:
            PlayerError: the player has ended, or the time limit has passed.
        """
        poll = select.poll()
        poll.register(descriptor, event)
        while not poll.poll(1000 * max(0.0, min(_POLL, self._until - time.monotonic()))):
            self._check_player(what)

    def _check_player(self, what: str) -> None:
        if self.unity_proc is not None and self.unity_proc.poll() is not None:
            raise self._ended()
        if time.monotonic() > self._until:
            raise self._late(what)

    def _late(self, what: str) -> PlayerError:
        return PlayerError(f"AI2-THOR's player did not {what} in time", code="player_timeout", where=self._doing())

    def _ended(self) -> PlayerError:
        return PlayerError("AI2-THOR's player has ended", code="player_ended", where=self._doing())

    def _doing(self) -> str:
        last = self._last_action_message
        return f"action {last[:300].decode(errors='replace')}" if last else "start of the player"
