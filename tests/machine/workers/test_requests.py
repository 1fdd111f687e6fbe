"""Whatever comes in place of an answer: the caller gets its own, or one of the errors that are promised."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from armature.components.machine.workers.channel import CallLimits, Channel, encoded
from armature.components.machine.workers.requests import ANYTHING, ReplyForm, Requests, array_of, new_number

Answer = Callable[[int], bytes]


def document(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def asked(
    answer: Answer,
    reply: TypeAdapter[Any] = ANYTHING,
    *,
    seconds: float = 20.0,
    most_bytes: int = 2**20,
    most_parts: int = 0,
) -> tuple[list[Any], Any]:
    """Send a request and return its parts and its reply. The other side sends the bytes `answer(number)`, where
    `number` is the request's number, and closes the channel."""
    ours, theirs = socket.socketpair()
    number = new_number()
    data = answer(number)

    def work() -> None:
        with theirs:
            Channel(theirs).receive()
            theirs.sendall(data)

    with ours:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            limits = CallLimits(seconds, most_bytes)
            return Requests(ours).ask(number, encoded([number]), limits, reply, ANYTHING, most_parts)
        finally:
            ours.close()
            thread.join()


def in_text(text: str) -> Answer:
    return lambda number: document(text.replace("NUMBER", str(number))) + bytes(8)


def array(name: Any, shape: Any) -> str:
    return json.dumps(["NUMBER", "done", {"$array": [name, shape]}]).replace('"NUMBER"', "NUMBER")


MALFORMED = {
    "empty": "[]",
    "no list": '{"a": 1}',
    "nothing": "null",
    "deep value": '[NUMBER, "done", ' + "[" * 90_000 + "]" * 90_000 + "]",
    "long number": '[NUMBER, "done", ' + "9" * 5000 + "]",
    "no number": '["done", 1]',
    "null as number": '[null, "done", 1]',
    "true as number": '[true, "done", 1]',
    "small number": '[1, "done", 1]',
    "negative number": '[-NUMBER, "done", 1]',
    "text as number": '["NUMBER", "done", 1]',
    "later number": '[NUMBER9, "done", 1]',
    "four parts": '[NUMBER, "done", 1, 1]',
    "kind unknown": '[NUMBER, "maybe", 1]',
    "kind a list": '[NUMBER, ["done"], 1]',
    "part not expected": '[NUMBER, "part", 1]',
    "error without parts": '[NUMBER, "refused", ["DataError"]]',
    "error of numbers": '[NUMBER, "refused", [1, 2, 3, 4]]',
    "error as object": '[NUMBER, "refused", {"DataError": 1, "b": 1, "c": 1, "d": 1}]',
    "failure without text": '[NUMBER, "failed", {"a": 1}]',
    "objects": array("|O", [1]),
    "structure": array([["a", "<i4"]], [1]),
    "negative side": array("<i4", [-1]),
    "side not a number": array("<i4", ["1"]),
    "true as side": array("<i4", [True]),
    "shape not a list": array("<i4", 1),
    "array of nothing": '[NUMBER, "done", {"$array": null}]',
    "array too large": array("<f8", [2**40, 2**40]),
    "array with a huge side": array("<f8", [0, 2**70]),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_answer_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        asked(in_text(text))


def test_late_answers_are_dropped() -> None:
    earlier = new_number()
    late = encoded([earlier, "done", "late"]) + encoded([earlier, "part", np.zeros(3)])
    assert asked(lambda number: late + encoded([number, "done", "mine"])) == ([], "mine")


@given(st.integers() | st.sampled_from([None, True, 1.5, "1", [1]]))
def test_reply_must_repeat_the_call_number(other: Any) -> None:
    def answer(number: int) -> bytes:
        return encoded([number + other if type(other) is int else other, "done", "forged"])

    if other != 0 or type(other) is not int:
        with pytest.raises((ValueError, EOFError)):
            asked(answer)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3), st.floats(0, 1))
def test_damaged_answer_is_equal_or_refused(edits: list[tuple[float, int]], cut: float) -> None:
    """The damage is before the value, or cuts it off: another value could not be told from the right one."""
    value = {"a": [1, None, "x"], "b": np.arange(3, dtype=np.int16)}

    def answer(number: int) -> bytes:
        sent = bytearray(encoded([number, "done", value]))
        end = sent.index(b"done") + 5
        for place, byte in edits:
            sent[int(place * end)] = byte
        return bytes(sent[: round(len(sent) * min(1.0, 2 * cut))])

    try:
        _, reply = asked(answer, seconds=5.0)
    except (ValueError, EOFError):
        return
    assert reply["a"] == value["a"] and np.array_equal(reply["b"], value["b"])


def test_false_length_allocates_no_memory() -> None:
    def answer(number: int) -> bytes:
        text = json.dumps([number, "done", {"$array": ["|u1", [2**29]]}])
        return document(text) + bytes(100)

    tracemalloc.start()
    with pytest.raises(EOFError):
        asked(answer, most_bytes=2**30)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_late_answers_do_not_extend_a_call() -> None:
    ours, theirs = socket.socketpair()
    earlier, number = new_number(), new_number()
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.05):
            theirs.sendall(encoded([earlier, "done", 1]))

    with ours, theirs:
        thread = threading.Thread(target=work)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            Requests(ours).ask(number, encoded([number]), CallLimits(0.4, 2**20), ANYTHING, ANYTHING, 9)
        stop.set()
        thread.join()
    assert 0.3 < time.monotonic() - began < 3


Flag = Annotated[np.ndarray, PlainValidator(array_of(np.uint8, 1))]
Vector = Annotated[np.ndarray, PlainValidator(array_of(np.float32, 1))]


class Form(ReplyForm):
    number: float
    whole: Annotated[int, Field(ge=0)]
    flag: bool
    text: str
    state: Vector
    image: Flag


WHOLE = {
    "number": 0.5,
    "whole": 1,
    "flag": True,
    "text": "x",
    "state": np.zeros(2, np.float32),
    "image": np.zeros(2, np.uint8),
}


@pytest.mark.parametrize(
    "change",
    [
        *({"number": each} for each in (None, "1", True, float("nan"), float("inf"), 10**400, [1.0])),
        *({"whole": each} for each in (None, "1", True, 1.0, 1.5, -1)),
        *({"flag": each} for each in (None, 1, 0, "true")),
        *({"text": each} for each in (None, 1, ["x"])),
        *({"state": each} for each in (None, [0.0], np.zeros(2), np.zeros((2, 1), np.float32))),
        *({"state": np.array([each], np.float32)} for each in (np.nan, np.inf)),
        *({"image": each} for each in (np.zeros(2, bool), np.zeros(2, np.int8), "00")),
        {"more": 1},
    ],
)
def test_reply_with_wrong_types_is_refused_and_not_converted(change: dict[str, Any]) -> None:
    adapter = TypeAdapter(Form)
    adapter.validate_python(WHOLE)
    with pytest.raises(ValidationError):
        adapter.validate_python({**WHOLE, **change})
