"""Replies of workers: what comes over the socket, and what the code of a reward writes into it."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from armature.components.contracts.errors import RolloutFailed
from armature.components.environments.alfworld.text.host import ENGINE_REPLY
from armature.components.machine.workers.channel import CallLimits, encoded
from armature.components.machine.workers.requests import ANYTHING, HandlerFailed, Requests, new_number
from armature.components.rewards.make import GRADE, SOURCES, Rewards, make_rewards
from armature.components.rewards.reward import RewardInput, RewardSettings
from armature.components.robots.datasets.measure import MEASURED
from armature.components.robots.libero.processes import IMAGES, OBSERVATION, OUTCOME, PROGRESS, STEP
from armature.components.rollouts.shards import SHARD_REPLY
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps

IMAGE = {"$array": ["|u1", [2, 2, 3]]}
SEEN = {"images": {"front": IMAGE}, "state": {"$array": ["<f4", [3]]}, "task": "lift it", "previous": None}
ARRAYS = bytes(range(12)) + np.arange(3, dtype="<f4").tobytes()
GOAL = {"holds": False, "reach": 0.5, "grasped": True, "place": None}
VALUES = {
    "grade": (GRADE, 0.25, b""),
    "failure": (GRADE, ["reward_error", "ValueError: not this"], b""),
    "sources": (SOURCES, {"function": "abc", "numpy": "2.0"}, b""),
    "engine": (ENGINE_REPLY, {"feedback": "You see a fork.", "commands": ["look", "take fork 1"], "won": False}, b""),
    "observation": (OBSERVATION, SEEN, ARRAYS),
    "images": (IMAGES, {"front": IMAGE}, ARRAYS[:12]),
    "step": (STEP, {"observation": SEEN, "success": True, "steps": 3}, ARRAYS),
    "progress": (PROGRESS, [GOAL, {**GOAL, "place": 0.25}], b""),
    "outcome": (OUTCOME, {"success": True, "steps": 8, "phase": "done", "retries": 0}, b""),
    "shard": (SHARD_REPLY, {"made": False, "suspects": [{"name": "a", "weights_id": "1-2", "reason": "timeout"}]}, b""),
    "measured": (MEASURED, {"episodes": {"$array": ["|u1", [12]]}, "values": {}, "histograms": {}}, ARRAYS[:12]),
}
REWARD = """
import inspect, json, os, struct, sys
from armature.components.machine.workers.channel import serve

def forge(completion):
    if completion != "good":
        frame = inspect.currentframe()
        while frame.f_code is not serve.__code__:
            frame = frame.f_back
        text = json.loads(completion).replace("NUMBER", str(frame.f_locals["number"])).encode("utf-8", "surrogatepass")
        os.write(int(sys.argv[1]), struct.pack("<Q", len(text)) + text)
    return 1.0
"""


def framed(document: bytes) -> bytes:
    return struct.pack("<Q", len(document)) + document


def documents(data: bytes) -> Iterator[Any]:
    """Yield the JSON documents in `data`, each of which follows its length in 8 bytes. Yield None for an incomplete
    document, and stop at one that is not JSON."""
    while len(data) >= 8:
        (length,) = struct.unpack("<Q", data[:8])
        try:
            yield json.loads(data[8 : 8 + length]) if 8 + length <= len(data) else None
        except (ValueError, RecursionError):
            return
        data = data[8 + length :]


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def answered(sent: bytes, number: int, kind: str) -> Any:
    """Return the value of the first document with this request number. Fail if there is none or if it is not a
    reply."""
    for document in documents(sent):
        if isinstance(document, list) and len(document) == 3 and document[0] == number:
            expect(type(document[0]) is int and document[1] == "done", f"{kind}: another answer is the reply")
            return document[2]
    expect(False, f"{kind}: a reply that was not sent")
    return None


def check(kind: str, sent: bytes, number: int, value: Any) -> None:
    """Compare a reply with the document that was sent."""
    shown = answered(sent, number, kind)
    if kind in ("grade", "failure"):
        if isinstance(value, tuple):
            expect(list(value) == shown and all(type(each) is str for each in shown), "another failure")
        else:
            expect(is_number(shown) and value == float(shown), f"{shown!r} became the grade {value!r}")
    elif kind == "sources":
        expect(value == shown, "other sources")
    elif kind == "engine":
        expect({**value.model_dump(), "commands": list(value.commands)} == shown, "another game")
        expect(type(shown["won"]) is bool, "another flag")
    elif kind in ("observation", "step"):
        seen, document = (value, shown) if kind == "observation" else (value.observation, shown["observation"])
        expect(seen.state.dtype == np.float32 and bool(np.isfinite(seen.state).all()), "a state that is not finite")
        expect(all(each.dtype == np.uint8 and each.ndim == 3 for each in seen.images.values()), "not an image")
        expect(seen.images.keys() == document["images"].keys() and seen.task == document["task"], "another sight")
    elif kind == "progress":
        rounded = [{**goal, "reach": float(goal["reach"])} for goal in shown]  # 10**30 is no double
        expect([goal.model_dump() for goal in value] == rounded, f"{shown} became the progress {value}")
        expect(all(is_number(goal.reach) for goal in value), "a distance that is not finite")
    elif kind in ("outcome", "shard"):
        expect(value.model_dump() == shown, f"another {kind}")


def over_a_socket(rng: random.Random) -> bool:
    kind = rng.choice(list(VALUES))
    form, value, arrays = VALUES[kind]
    earlier, number = new_number(), new_number()
    message = [number, "done", value]
    sent = framed(dumps([earlier, "done", 1])) if rng.random() < 0.2 else b""
    way = rng.random()
    if way < 0.6:
        sent += framed(dumps(damaged_document(message, rng))) + arrays
    elif way < 0.9:
        sent = damaged_bytes(sent + framed(dumps(message)) + arrays, rng)
    else:
        other = rng.choice(["part", "refused", "failed", "done", 1, None])
        sent += framed(dumps(damaged_document([number, other, ["DataError", "a", "b", "c"]], rng)))
    ours, theirs = socket.socketpair()

    def work() -> None:
        with theirs, suppress(OSError):
            theirs.recv(4096)
            theirs.sendall(sent)

    with ours:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        requests = Requests(ours)
        try:
            limits = CallLimits(5.0, 2**20)
            _, reply = requests.ask(number, encoded([number, "method", []]), limits, form, ANYTHING, 0)
        except TimeoutError:  # The other side has gone long before.
            raise
        except (ValueError, EOFError, OSError, HandlerFailed):
            return False
        finally:
            requests.close()
            thread.join()
        check(kind, sent, number, reply)
        return True


def graded(rewards: Rewards, completion: str) -> float | None:
    """Grade a completion. Return the grade, or None if the rollout fails."""
    try:
        (value,) = asyncio.run(rewards.grade(RewardInput(completion, "a", {}))).values()
    except RolloutFailed:
        return None
    return value


def by_a_reward(rewards: Rewards, rng: random.Random) -> bool:
    value = rng.choice([0.25, ["reward_error", "forged"]])
    document = damaged_document(["NUMBER", rng.choice(["done", "part", "failed", "refused"]), value], rng)
    text = dumps(document).decode().replace('"NUMBER"', "NUMBER")
    grade = graded(rewards, json.dumps(text))
    if grade not in (None, 1.0):  # code that finds the number of its request can grade itself, and nobody else
        shown = json.loads(text.replace("NUMBER", "1"))
        expect(
            shown[1] == "done" and is_number(shown[2]) and float(shown[2]) == grade,
            f"{text} became the grade {grade!r}",
        )
    for _ in range(2):
        expect(graded(rewards, "good") == 1.0, f"after {text}, a good completion has another grade")
    return grade is not None


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    (folder / "forging.py").write_text(REWARD)
    settings = RewardSettings.model_validate({"name": "function", "function": "forging:forge", "timeout": 5.0})
    with closing(make_rewards([settings], folder=folder)) as rewards:
        yield lambda rng: by_a_reward(rewards, rng) if rng.random() < 0.05 else over_a_socket(rng)
