"""Code of a reward that forks or writes to the caller by itself: it costs its own rollout, and no other one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from armature.components.contracts.errors import RolloutFailed
from armature.components.rewards.make import Rewards

from .grading import grade, made

MODULE = """
import ctypes, inspect, json, os, struct, sys, threading, time
from armature.components.machine.workers.channel import serve

def framed(text):
    frame = inspect.currentframe()
    while frame.f_code is not serve.__code__:
        frame = frame.f_back
    number = frame.f_locals.get("number", 0)
    text = text.replace("NUMBER", str(number)).replace("NEXT", str(number + 2**32)).encode()
    return struct.pack("<Q", len(text)) + text

def send(data):
    os.write(int(sys.argv[1]), data)

def later(function, *arguments):
    threading.Timer(0.05, function, arguments).start()

def hostile(completion):
    what, *arguments = json.loads(completion)
    if what == "number":
        return arguments[0]
    if what == "fork":
        fork = os.fork if arguments[0] == "python" else ctypes.CDLL(None).fork
        if fork() == 0:
            time.sleep(arguments[2])
            if arguments[1] == "raise":
                raise ValueError("in the child")
            if arguments[1] == "exit":
                sys.exit(0)
            return 77.0
    if what == "write":
        send(framed(arguments[0]))
        time.sleep(arguments[1])
    if what == "write again and again":
        while True:
            send(framed(arguments[0]))
            time.sleep(arguments[1])
    if what == "write later":
        later(send, framed(arguments[0]))
    if what == "end later":
        later(os._exit, 3)
    return 0.5
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewards]:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "hostile_rewards.py").write_text(MODULE)
    with closing(made("function", folder, function="hostile_rewards:hostile", timeout=2.0)) as rewards:
        yield rewards


def asked(rewards: Rewards, *what: Any) -> float:
    return grade(rewards, json.dumps(what), None)


def grades_follow(rewards: Rewards) -> bool:
    return [asked(rewards, "number", number) for number in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["python", "c"])
@pytest.mark.parametrize("child", ["return", "raise", "exit"])
def test_forked_child_grades_nothing(hostile: Rewards, how: str, child: str) -> None:
    for seconds in (0.0, 0.03):
        assert asked(hostile, "fork", how, child, seconds) == 0.5
        assert grades_follow(hostile)
        time.sleep(0.05)
        assert grades_follow(hostile)


@pytest.mark.parametrize("text", ['[NUMBER, "part", 0]', '[4294967297, "done", 0]'])
def test_endless_process_output_fails_within_timeout(hostile: Rewards, text: str) -> None:
    asked(hostile, "number", 0)
    began = time.monotonic()
    with pytest.raises(RolloutFailed):
        asked(hostile, "write again and again", text, 0.2)
    assert time.monotonic() - began < 4
    assert asked(hostile, "number", 0.25) == 0.25


@pytest.mark.parametrize(
    "what",
    [
        ("write later", '[NUMBER, "done", 0.75]'),
        ("write later", '[NEXT, "done", 0.75]'),
        ("write later", '["done", 0.75]'),
        ("end later",),
    ],
    ids=["again", "next", "without a number", "end"],
)
def test_late_output_or_exit_does_not_affect_next_completion(hostile: Rewards, what: tuple[Any, ...]) -> None:
    assert asked(hostile, *what) == 0.5
    time.sleep(0.15)
    assert grades_follow(hostile)
