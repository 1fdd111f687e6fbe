"""A stand-in for `vla-eval run` with one benchmark: a point that must reach the origin, pushed by an action.

It speaks vla-eval's protocol, written here from its description, without vla-eval's code: the test in tests/interop
plays the same part with the real one. The benchmark's params say what goes wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from websockets.sync.client import connect

TASKS = ("near", "far")


def start(task: str, episode: int) -> Any:
    return (1.0 + TASKS.index(task)) * np.array([np.cos(episode + 1.0), np.sin(episode + 1.0)])


def solved(point: Any) -> bool:
    return bool(np.linalg.norm(point) < 0.15)


def seen(task: str, point: Any, params: dict[str, Any]) -> dict[str, Any]:
    image = np.full(params.get("shape", [16, 16, 3]), int(40 * np.linalg.norm(point)) % 256, np.uint8)
    state = np.concatenate([point, np.zeros(params.get("more", 0))])
    images = dict.fromkeys(params.get("cameras", ["front"]), image)
    return {"images": images, "states": state, "task_description": f"go from {task}"}


def pack(value: Any) -> Any:
    return {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}


def unpack(value: dict[str, Any]) -> Any:
    if "__ndarray__" not in value:
        return value
    return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])


class SimulatorError(Exception):
    """Stands for an exception of the simulator."""


class Benchmark:
    def __init__(self, url: str, params: dict[str, Any], folder: Path) -> None:
        self.params, self.folder, self.number = params, folder, 0
        self.socket = connect(url, compression=None, max_size=None, ping_interval=None)
        self.send("hello", {"harness_version": "0.8.0", "protocol_version": params.get("version", 1)})
        assert self.receive()["type"] == "hello"

    def send(self, kind: str, payload: Any) -> None:
        self.number += 1
        message = {"type": kind, "payload": payload, "seq": self.number, "timestamp": time.time()}
        self.socket.send(msgpack.packb(message, default=pack))

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = msgpack.unpackb(self.socket.recv(), object_hook=unpack)
        assert answer["seq"] == self.number and isinstance(answer["timestamp"], float)
        return answer

    def play(self, task: str, episode: int, max_steps: int) -> None:
        point, number = start(task, episode), 0
        self.fail(f"{task}/{episode}/0")
        self.send("episode_start", {"task": {"name": task, "suite": "plane", "episode_idx": episode}})
        for number in range(1, max_steps + 1):
            self.fail(f"{task}/{episode}/{number}")
            self.send("observation", seen(task, point, self.params))
            answer = self.receive()
            if answer["type"] == "error":
                print(f"{task}/{episode} error {answer['payload']['error']}", flush=True)
                return
            point = point + 0.2 * np.asarray(answer["payload"]["actions"])[:2]
            if solved(point) or number == self.params.get("ends"):
                break
        result = (
            {"success": solved(point)}
            if "result" not in self.params
            else {key: np.asarray(value) for key, value in self.params["result"].items()}
        )
        with (self.folder.parent / "played").open("a") as file:
            file.write(f"{task}/{episode}\n")
        self.send("episode_end", {"metrics": result, "steps": number, "elapsed_sec": 0.0})

    def fail(self, place: str) -> None:
        """Fail at a place, TASK/EPISODE/STEP, as the params say: always, or only at the first time."""
        how = self.params.get("failures", {}).get(place)
        marker = self.folder.parent / f"failed-{place.replace('/', '-')}"
        if how is None or (how.endswith("once") and marker.exists()):
            return
        marker.touch()
        if how.startswith("raises"):
            raise SimulatorError
        if how.startswith("dies"):
            print("the simulator crashed", flush=True)
            os._exit(3)
        self.socket.send(
            {"text": "hello", "junk": b"\xc1", "large": bytes(2**26 + 1), "list": b"\x90"}.get(how, b"\x80")
        )
        time.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["run"])
    for name in ("--config", "--server-url"):
        parser.add_argument(name, required=True)
    parser.add_argument("--no-save", action="store_true", required=True)
    options = parser.parse_args()
    config = json.loads(Path(options.config).read_text())
    (entry,) = config["benchmarks"]
    benchmark = Benchmark(options.server_url, entry["params"], Path(config["output_dir"]))
    for task in TASKS:
        chosen = {task, "plane"} & {*entry["tasks"]}  # by its name or its suite, as vla-eval does
        for episode in range(entry["episodes_per_task"] if chosen else 0):
            with suppress(SimulatorError):  # as vla-eval does, which tells the server nothing
                benchmark.play(task, episode, entry["max_steps"])
    benchmark.socket.close()


if __name__ == "__main__":
    main()
