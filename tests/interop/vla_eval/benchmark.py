"""A benchmark of vla-eval, and its run: what LIBERO's sends, from no simulator. Runs where vla-eval is installed.

`python benchmark.py URL RUNS` evaluates the model server at URL, so often at the same time, and prints JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from vla_eval.api import run
from vla_eval.benchmarks.base import StepBenchmark, StepResult

STEPS = 6
played: list[dict[str, list[list[float]]]] = []
"""One dictionary for each run: the executed actions of an episode, by task and number of the episode."""


def seen(task: str, episode: int, step: int) -> dict[str, Any]:
    """Return the observation at a step of an episode. It depends only on the arguments, so the test can compute the
    policy's answer to it."""
    rng = np.random.default_rng((len(task), episode, step))
    views = {"agentview": (40, 50, 3), "wrist": (28, 28, 3)}
    images = {name: rng.integers(0, 256, shape, np.uint8) for name, shape in views.items()}
    return {"images": images, "task_description": task, "states": rng.uniform(-1, 1, 8)}


class Table(StepBenchmark):
    """A benchmark with two tasks. An episode is solved after `STEPS` actions, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self._actions: dict[str, list[list[float]]] = {}
        played.append(self._actions)

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": name, "suite": "table"} for name in ("put the bowl away", "wait")]

    def reset(self, task: dict[str, Any]) -> int:
        self._key = f"{task['name']}/{task['episode_idx']}"
        self._actions[self._key] = []
        self._place = 0
        return 0

    def step(self, action: dict[str, Any]) -> StepResult:
        self._actions[self._key].append(np.asarray(action["actions"], np.float64).tolist())
        self._place += 1
        return StepResult(obs=self._place, reward=0.0, done=self._place == STEPS, info={})

    def make_obs(self, raw_obs: int, task: dict[str, Any]) -> dict[str, Any]:
        return seen(task["name"], task["episode_idx"], raw_obs)

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": step_result.done}

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": 20, "max_episodes_per_task": 5}

    def get_action_spec(self) -> dict[str, Any]:
        return {}

    def get_observation_spec(self) -> dict[str, Any]:
        return {}


def evaluate(url: str, episodes: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:  # of this run alone: its progress is in a file with the benchmark's name
        benchmarks = [{"benchmark": f"{__name__}:Table", "episodes_per_task": episodes}]
        (result,) = run({"benchmarks": benchmarks, "output_dir": folder}, server_url=url, docker=False, no_save=True)
    return dict(result)


if __name__ == "__main__":
    sys.modules["benchmark"] = sys.modules["__main__"]
    __name__ = "benchmark"
    threads = [threading.Thread(target=evaluate, args=(sys.argv[1], 2)) for _ in range(int(sys.argv[2]) - 1)]
    for thread in threads:
        thread.start()
    result = evaluate(sys.argv[1], 2)
    for thread in threads:
        thread.join()
    print(json.dumps({"result": result, "played": played}))
