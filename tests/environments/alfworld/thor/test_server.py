"""The pipes to a player that sends arbitrary data or nothing."""

from __future__ import annotations

import copy
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from armature.components.environments.alfworld.thor.metadata import PlayerError

pytest.importorskip("ai2thor")
from armature.components.environments.alfworld.thor.server import PlayerServer
from tests.refusals import refused

WIDTH, HEIGHT = 4, 3
METADATA, PATCH, RGB, IDS, END = 1, 11, 4, 9, 255
THING = {
    "objectId": "Apple|+00.00|+01.00|+00.00",
    "objectType": "Apple",
    "visible": True,
    "position": {"x": 0.0, "y": 1.0, "z": 0.0},
    **dict.fromkeys(("receptacle", "pickupable", "toggleable", "isToggled"), False),
    "parentReceptacles": None,
    "receptacleObjectIds": None,
}
AGENT: dict[str, Any] = {
    "screenWidth": WIDTH,
    "screenHeight": HEIGHT,
    "sceneName": "FloorPlan1_physics",
    "lastAction": "Pass",
    "lastActionSuccess": True,
    "errorMessage": "",
    "errorCode": "",
    "actionReturn": None,
    "thirdPartyCameras": [],
    "objects": [THING],
    "inventoryObjects": [],
    "colors": [{"name": THING["objectId"], "color": [1, 2, 3]}],
    "agent": {"position": {"x": 0.0, "y": 0.9, "z": 0.0}, "cameraHorizon": 30.0},
}
ANSWER: dict[str, Any] = {"agents": [AGENT], "thirdPartyCameras": [], "activeAgentId": 0, "sequenceId": 0}
FRAME = np.arange(WIDTH * HEIGHT * 3, dtype=np.uint8).tobytes()


def field(kind: int, body: bytes) -> bytes:
    return struct.pack("!BI", kind, len(body)) + body


def message(metadata: Any = ANSWER, frame: bytes = FRAME) -> bytes:
    return field(METADATA, msgpack.packb(metadata)) + field(RGB, frame) + field(END, b"")


class Player:
    """The player's end of the pipes, without a program."""

    def __init__(self, timeout: float = 5.0) -> None:
        self.server = PlayerServer(width=WIDTH, height=HEIGHT, timeout=timeout)
        self.server.start()

    def answers(self, data: bytes, timeout: float | None = None) -> Any:
        """Send `data`, close the player's end, and return the server's event."""

        def write() -> None:
            with open(self.server.server_pipe_path, "wb") as pipe:  # noqa: PTH123
                try:
                    pipe.write(data)
                    pipe.flush()
                except BrokenPipeError:
                    pass

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        try:
            return self.server.receive(timeout)
        finally:
            self.server.stop()
            thread.join(5)


@pytest.fixture
def player() -> Iterator[Player]:
    yield Player()


def test_valid_answer_becomes_event_with_top_row_first(player: Player) -> None:
    event = player.answers(message())
    assert event.frame.shape == (HEIGHT, WIDTH, 3)
    assert event.frame[0, 0].tolist() == [24, 25, 26]
    assert event.metadata["objects"][0]["objectId"] == THING["objectId"]


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    answer = copy.deepcopy(ANSWER)
    change(answer)
    return message(answer)


class Executes:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "data",
    [
        field(END, b""),
        field(RGB, FRAME) + field(END, b""),
        field(METADATA, b"\xc1") + field(END, b""),
        field(METADATA, b"\x91" * 5000) + field(END, b""),
        field(METADATA, pickle.dumps(Executes())) + field(END, b""),
        field(METADATA, msgpack.packb(msgpack.ExtType(42, pickle.dumps(Executes())))) + field(END, b""),
        field(PATCH, msgpack.packb({"agentId": 0})) + field(END, b""),
        field(77, b"what") + field(END, b""),
        message([]),
        message({}),
        message("metadata"),
        message(ANSWER, FRAME[:-1]),
        message(ANSWER, b""),
        changed(lambda answer: answer.update(sequenceId=7)),
        changed(lambda answer: answer.update(agents=[])),
        changed(lambda answer: answer.update(agents=[AGENT, AGENT])),
        changed(lambda answer: answer["agents"][0].pop("objects")),
        changed(lambda answer: answer["agents"][0].update(screenWidth=0)),
        changed(lambda answer: answer["agents"][0].update(screenWidth=-WIDTH)),
        changed(lambda answer: answer["agents"][0].update(screenWidth=10**9)),
        changed(lambda answer: answer["agents"][0].update(lastActionSuccess="yes")),
        changed(lambda answer: answer["agents"][0].update(colors=[{"name": "x", "color": [1, 2, 300]}])),
        changed(lambda answer: answer["agents"][0]["objects"][0].update(position={"x": float("nan"), "y": 0, "z": 0})),
        changed(lambda answer: answer["agents"][0]["objects"][0].update(receptacleObjectIds="all of them")),
        field(METADATA, msgpack.packb(ANSWER)) + field(IDS, b"12345") + field(END, b""),
        field(METADATA, msgpack.packb(ANSWER)) + field(IDS, b"") + field(END, b""),
    ],
)
def test_rejects_invalid_answers_without_executing_them(
    player: Player, data: bytes, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("player_answer_unreadable"):
        player.answers(data)
    assert list(tmp_path.iterdir()) == []


def test_silent_player_times_out() -> None:
    player = Player(timeout=0.3)
    for call in (player.server.receive, lambda: player.server.send({"action": "Pass"})):
        with refused("player_timeout"):
            call()


def test_player_that_reads_nothing_times_out() -> None:
    player = Player(timeout=0.5)
    reader = os.open(player.server.client_pipe_path, os.O_RDONLY | os.O_NONBLOCK)
    with refused("player_timeout", "SetObjectPoses"):
        player.server.send({"action": "SetObjectPoses", "objectPoses": ["x" * 1000] * 1000})
    os.close(reader)
    with refused("player_ended", "SetObjectPoses"):
        player.server.send({"action": "SetObjectPoses", "objectPoses": ["x" * 1000] * 1000})


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack("!BI", RGB, 2**32 - 1), "player_answer_too_large"),
        (field(RGB, bytes(2**24)) * 20, "player_answer_too_large"),
        (message()[:-3], "player_ended"),
        (b"", "player_ended"),
    ],
    ids=["long field", "many fields", "cut", "empty"],
)
def test_rejects_endless_and_truncated_answers(data: bytes, code: str) -> None:
    with refused(code):
        Player().answers(data)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid message with some bytes replaced, removed or repeated, or with one value in its metadata replaced."""
    if draw(st.booleans()):
        answer = copy.deepcopy(ANSWER)
        place: Any = draw(st.sampled_from([answer, answer["agents"][0], answer["agents"][0]["objects"][0]]))
        values = st.none() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
        place[draw(st.sampled_from(sorted(place)))] = draw(values)
        return message(answer)
    data = bytearray(message())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 9))] = draw(st.binary(max_size=9))
    return bytes(data)


@run(max_examples=600)
@given(damaged() | st.binary(max_size=200))
def test_arbitrary_answers_become_event_or_error(data: bytes) -> None:
    try:
        event = Player(timeout=10.0).answers(data)
    except PlayerError:
        return
    assert isinstance(event.metadata["lastActionSuccess"], bool)
    for thing in event.metadata["objects"]:
        assert isinstance(thing["objectId"], str)
