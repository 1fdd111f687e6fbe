"""Runs where vla-eval and Meta-World are installed.

`python metaworld_side.py serve PORT` is a policy server of openpi's protocol whose answers are the actions of
Meta-World's scripted policies for the task that the prompt names, one at a time. `python metaworld_side.py play TASK
EPISODES SEED STEPS` plays the same without any server, and prints JSON: success and actions of each episode. `python
metaworld_side.py see TASK SEED RESOLUTION FILE` saves the first observation of an episode.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from metaworld.policies import ENV_POLICY_MAP
from websockets.sync.server import ServerConnection, serve

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import metaworld_benchmark

TASKS = {words: name for name, words in metaworld_benchmark.WORDS.items()}


def act(name: str, state: Any) -> Any:
    seen = np.asarray(state, np.float32).astype(np.float64)
    return np.clip(ENV_POLICY_MAP[name]().get_action(seen), -1, 1).astype(np.float32)


def answer(connection: ServerConnection) -> None:
    array = {"__ndarray__": True, "dtype": "<f4", "shape": [1, 4]}
    described = {name: {} for name in ("observation/image", "observation/state", "prompt")}
    connection.send(msgpack.packb({"observation": {**described, "seed": {"optional": True}}}))
    for frame in connection:
        seen = msgpack.unpackb(frame)
        state = np.frombuffer(seen["observation/state"][b"data"], "<f4")
        actions = act(TASKS[seen["prompt"]], state)
        packed = {key.encode(): part for key, part in {**array, "data": actions.tobytes()}.items()}
        connection.send(msgpack.packb({"actions": packed}))


def play(name: str, episodes: int, seed: int, steps: int) -> list[dict[str, Any]]:
    bench = metaworld_benchmark.MetaWorld(seed, full_state=True)
    played = []
    for episode in range(episodes):
        state = bench.reset({"name": name, "episode_idx": episode})
        actions: list[list[float]] = []
        success = False
        while len(actions) < steps and not success:
            action = act(name, state)
            actions.append(action.tolist())
            result = bench.step({"actions": action})
            state, success = result.obs, result.info["success"]
        played.append({"success": success, "actions": actions})
    return played


def see(name: str, seed: int, resolution: int, file: str) -> None:
    bench = metaworld_benchmark.MetaWorld(seed, resolution)
    task = {"name": name, "episode_idx": 0}
    seen = bench.make_obs(bench.reset(task), task)
    np.savez(file, image=seen["images"]["corner2"], state=seen["state"].astype(np.float32))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        with serve(answer, "127.0.0.1", int(sys.argv[2]), compression=None, max_size=None) as server:
            server.serve_forever()
    elif sys.argv[1] == "see":
        see(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        print(json.dumps(play(sys.argv[2], *map(int, sys.argv[3:]))))
