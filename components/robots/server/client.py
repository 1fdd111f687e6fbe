"""A policy that another program serves over openpi's protocol, as a `RobotPolicy`.

The server sends its metadata, and then an answer to each observation; see `wire`. openpi's own servers draw noise from
a state that grows with every answer; ours, and others whose metadata describe a field `seed`, draw it from that seed.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from armature.components.contracts.errors import ConfigurationError, DataError, ServerError, keep_secret
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.settings import ServedPolicySettings
from armature.components.robots.server.wire import (
    KEY,
    PROMPT,
    SCHEME,
    SEED,
    Message,
    kind,
    pack,
    sent_by,
    unpack,
    value_of,
)

LARGEST_ANSWER = 2**24
"""Largest message of a server, in bytes. A chunk of 50 actions has some 3 KB."""
PAUSES = (0.5, 2.0, 5.0)
"""Seconds before each further attempt to connect to a server that is gone."""
TOO_LARGE = 1009
"""Code with which a connection is closed because a message was too large."""
CLOSING = 2.0
"""Most seconds in which a connection is closed in order. A server that reads nothing would never let it end."""
_SPEAKS = "check that this server speaks openpi's protocol, then start again: finished episodes are kept"
COMPARED = ("observation", "actions", "policy")
"""Parts of the metadata that stay the same on every connection. Ours have the checkpoint's name in `policy`."""
ResultT = TypeVar("ResultT")


class _Connect(connect):
    """A connection that follows no redirects: another server than the named one would get the images and play."""

    def process_redirect(self, exc: Exception) -> Exception:
        """Return the error, so that it is raised."""
        return exc


def _shown(text: str) -> str:
    """Return a server's text for a message to people, without escape sequences, which could change a terminal."""
    return "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text)


class ServedPolicy:
    """Client of a policy server. Row i of a prediction is asked on connection i, all rows at the same time.

    Use it as a context manager, which closes the connections.

    Example:
        >>> def first_action(settings: ServedPolicySettings, observation: RobotObservation) -> NDArray[np.float32]:
        ...     with ServedPolicy(settings, list(observation.images), n_action_steps=5, rows=1) as policy:
        ...         return policy.predict([observation], seeds=[0])[0, 0]
    """

    def __init__(
        self, settings: ServedPolicySettings, cameras: Sequence[str], n_action_steps: int | None, rows: int
    ) -> None:
        """Connect to the server and read its metadata.

        Args:
            cameras: Names of an observation's images, in the order of `settings.camera_fields`.
            n_action_steps: Number of actions to execute of each answer; None: the number in the metadata.
            rows: Number of connections.

        Raises:
            ConfigurationError: the server refuses the key, describes other fields or actions, or does not tell
                `n_action_steps`.
            ServerError: the server cannot be reached, or sends no metadata.
        """
        self.rows_per_pass, self.action_dimensions = rows, settings.conventions.action_dimensions
        self._settings, self._cameras = settings, tuple(cameras)
        self._key = os.environ.get(KEY)
        if self._key is not None:
            keep_secret(self._key)
        self._connections: list[ClientConnection | None] = [None] * rows
        # The loop of a thread also answers pings between two predictions, when simulators compute for minutes.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy client", daemon=True)
        self._thread.start()
        try:
            self._metadata = self._run(self._exchange(0, None))
            self._described = self._described_fields()
            self.n_action_steps = self._action_steps(n_action_steps)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. The client cannot be used afterwards."""

        async def drop_all() -> None:
            await asyncio.gather(*map(self._drop, range(self.rows_per_pass)))

        self._run(drop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        """Return the observation unchanged: the server does all preprocessing."""
        return observation

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        """Ask for one chunk per observation: (N, n_action_steps, action dimensions) float32.

        Raises:
            ConfigurationError: a server that was started again describes another policy, or refuses the key.
            DataError: an answer is not a chunk of actions.
            ServerError: the server refuses an observation, is gone, or does not answer within `timeout_s`.
        """
        frames = [self._frame(*each) for each in zip(observations, seeds, strict=True)]

        async def ask() -> list[Message | BaseException]:
            asked = (self._exchange(row, frame) for row, frame in enumerate(frames))
            return await asyncio.gather(*asked, return_exceptions=True)

        chunks = []
        for answer in self._run(ask()):
            if isinstance(answer, BaseException):
                raise answer
            chunks.append(self._actions(answer))
        return np.stack(chunks)

    @property
    def seeded(self) -> bool:
        """True if the server draws an answer's noise from the seed of its request, so that evaluations repeat."""
        return SEED in self._described

    def facts(self) -> dict[str, Any]:
        """Return facts about the policy for reports."""
        settings = self._settings
        return {
            **{name: getattr(settings, name) for name in ("url", "weights")},
            "n_action_steps": self.n_action_steps,
            "seeded": self.seeded,
            "conventions": settings.conventions.model_dump(mode="json"),
        }

    def _frame(self, observation: RobotObservation, seed: int) -> bytes:
        images = zip(self._settings.camera_fields, self._cameras, strict=True)
        fields: Message = {field: observation.images[camera] for field, camera in images}
        fields |= {self._settings.state_field: observation.state, PROMPT: observation.task}
        return pack(fields | ({SEED: seed} if self.seeded else {}))

    def _actions(self, answer: Message) -> NDArray[np.float32]:
        """Return the actions to execute of an answer. That they are finite is checked where they are played."""
        with sent_by(self._settings.url, _SPEAKS):
            actions = value_of("actions", answer.get("actions"))
        expected = (self.n_action_steps, self.action_dimensions)
        if (
            not isinstance(actions, np.ndarray)
            or actions.dtype.kind != "f"
            or actions.shape[1:] != expected[1:]
            or len(actions) < expected[0]
        ):
            raise DataError(
                f"the server's actions are {kind(actions)}, not an array of floats with the shape "
                f"[{expected[0]} or more, {expected[1]}]",
                code="served_actions_invalid",
                where=f"field 'actions', {self._settings.url}",
                remedy="check policy.server.conventions.action_dimensions and evaluation.n_action_steps, and that "
                "the server returns actions in the simulator's form",
            )
        with np.errstate(over="ignore"):
            chunk: NDArray[np.float32] = actions[: self.n_action_steps].astype(np.float32)
        return chunk

    # --- The connections ---

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _exchange(self, row: int, frame: bytes | None) -> Message:
        """Send a request and return its answer; None: connect, and return the metadata.

        A request whose connection is lost is sent again on a new one. That is safe, because answers have no effects.
        """
        url, lost = self._settings.url, ""
        for pause in (0.0, *PAUSES):
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    if frame is None or self._connections[row] is None:
                        metadata = await self._connect(row)
                        if frame is None:
                            return metadata
                        self._refuse_change(metadata)
                    connection = self._connections[row]
                    assert connection is not None
                    await self._refuse_unasked(connection)
                    await connection.send(frame)
                    return self._read(await connection.recv())
            except TimeoutError as error:
                await self._drop(row)
                raise ServerError(
                    f"the policy server has not answered within {self._settings.timeout_s:g} s",
                    code="policy_timeout",
                    where=url,
                    remedy="see the server's log, or set a larger policy.server.timeout_s; finished episodes stay",
                ) from error
            except InvalidStatus as error:
                if error.response.status_code in (401, 403):
                    raise ConfigurationError(
                        "the policy server refuses the key" if self._key else "the policy server asks for a key",
                        code="policy_key_refused",
                        where=url,
                        remedy=f"set {KEY} to the server's key",
                    ) from error
                to = error.response.headers.get("Location")
                lost = f"status {error.response.status_code}" + (f", a redirect to {to}" if to else "")
            except (OSError, UnicodeError, WebSocketException) as error:  # UnicodeError: the host's name is invalid
                await self._drop(row)
                closed = isinstance(error, ConnectionClosed) and not error.rcvd_then_sent and error.sent
                if closed and closed.code == TOO_LARGE:
                    raise DataError(
                        f"the policy server's message has more than {LARGEST_ANSWER} bytes",
                        code="served_message_too_large",
                        where=url,
                        remedy="let the server send only the actions",
                    ) from error
                lost = str(error) or type(error).__name__
        raise ServerError(
            f"the policy server cannot be reached: {_shown(lost):.300}",
            code="policy_server_unreachable",
            where=url,
            remedy="start the server and the evaluation again: finished episodes are kept",
        )

    async def _connect(self, row: int) -> Message:
        """Open a connection and return the server's metadata, which is its first message."""
        headers = {"Authorization": f"{SCHEME}{self._key}"} if self._key else {}
        connection = self._connections[row] = await _Connect(
            self._settings.url,
            additional_headers=headers,
            compression=None,
            max_size=LARGEST_ANSWER,
            max_queue=1,
            open_timeout=None,
            # openpi's servers answer no ping while they compute, which would end the connection.
            ping_interval=None,
            proxy=None,
            close_timeout=1,
        )
        return self._read(await connection.recv())

    def _read(self, frame: bytes | str) -> Message:
        """Decode a message. A text frame is an error of the server, which may be a traceback: its last line says why.

        Raises:
            DataError: the message cannot be read.
            ServerError: it is an error.
        """
        if isinstance(frame, bytes):
            with sent_by(self._settings.url, _SPEAKS):
                return unpack(frame)
        lines = [line.strip() for line in _shown(frame).strip().splitlines()] or ["an empty text"]
        raise ServerError(
            f"the policy server reports an error: {lines[-1]:.300}" if len(lines) > 3 else f"{' '.join(lines):.300}",
            code="policy_server_error",
            where=self._settings.url,
            remedy="see the server's log; check policy.server.camera_fields and state_field",
        )

    async def _refuse_unasked(self, connection: ClientConnection) -> None:
        """Check that no message waits before a request is sent: it would be taken for the answer.

        Raises:
            DataError: there is one.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await connection.recv()
                raise DataError(
                    "the policy server has sent more than one message for a request",
                    code="served_message_unasked",
                    where=self._settings.url,
                    remedy="let the server answer each observation once; its answers belong to other observations",
                )

    async def _drop(self, row: int) -> None:
        connection, self._connections[row] = self._connections[row], None
        if connection is not None:
            with suppress(OSError, WebSocketException):
                async with asyncio.timeout(CLOSING):
                    await connection.close()
            connection.transport.abort()

    # --- The metadata ---

    def _refuse_change(self, metadata: Message) -> None:
        """Check that the metadata of a further connection describe the policy that the first one described.

        Raises:
            ConfigurationError: they differ, so the server was started again with another policy.
        """
        if changed := [name for name in COMPARED if metadata.get(name) != self._metadata.get(name)]:
            raise ConfigurationError(
                f"the policy server now describes another policy: {', '.join(changed)} changed in its metadata",
                code="served_policy_changed",
                where=self._settings.url,
                remedy="serve the same policy as before and start the evaluation again, or set policy.server.weights "
                "to the new policy's name, which plays all episodes again",
            )

    def _described_fields(self) -> Message:
        """Return the description of the server's fields, after checking that ours are among them; {} without one.

        Raises:
            ConfigurationError: the server needs other fields.
        """
        described = self._metadata.get("observation")
        if not isinstance(described, dict):
            return {}
        optional = {name for name, field in described.items() if isinstance(field, dict) and field.get("optional")}
        ours = {*self._settings.camera_fields, self._settings.state_field, PROMPT}
        if not described.keys() - optional <= ours <= described.keys():
            raise ConfigurationError(
                f"the policy server takes the fields {_shown(', '.join(described)):.300}, "
                f"and the evaluation sends {', '.join(sorted(ours))}",
                code="served_fields_mismatch",
                where=f"policy.server.camera_fields and state_field, {self._settings.url}",
                remedy="set them to the server's names, with the cameras in the order of conventions.cameras",
            )
        return described

    def _action_steps(self, wanted: int | None) -> int:
        """Return the number of actions to execute of each answer.

        Raises:
            ConfigurationError: the metadata have other dimensions or fewer actions, or no number is known.
        """
        described = self._metadata.get("actions")
        shape = described.get("shape") if isinstance(described, dict) else None
        if isinstance(shape, list) and len(shape) == 2 and all(type(side) is int for side in shape):
            if shape[1] != self.action_dimensions or shape[0] < (wanted or 1):
                raise ConfigurationError(
                    f"the policy server answers with actions of shape {shape}, and the evaluation needs "
                    f"[{wanted or 1} or more, {self.action_dimensions}]",
                    code="served_actions_mismatch",
                    where=f"evaluation.n_action_steps, {self._settings.url}",
                    remedy="evaluate a policy for the simulator's robot, and execute at most the actions of an answer",
                )
            return wanted or int(shape[0])
        if wanted is None:
            raise ConfigurationError(
                "the policy server does not say how many actions an answer has",
                code="action_steps_missing",
                where="evaluation.n_action_steps",
                remedy="set it to the number of actions to execute before the next request: 5 in openpi's evaluation",
            )
        return wanted
