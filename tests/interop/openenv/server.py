"""A server of OpenEnv's: name the color of an image; a wrong answer is told, a second one ends the episode."""

import argparse
import base64
import io
import os
import time
from typing import Literal

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from PIL import Image

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


class ColorAction(Action):
    color: Literal["red", "green", "blue", "crash", "die", "hang"]


class ColorObservation(Observation):
    message: str
    screen: str | list[list[list[int]]] | None = None


class ColorEnvironment(Environment[ColorAction, ColorObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, pixels=False, unrewarded=False, **kwargs):
        self._state, self._unrewarded = State(episode_id=episode_id), unrewarded
        self._answer = list(COLORS)[seed // 2 % 3]
        image = Image.new("RGB", (16, 16), COLORS[self._answer])
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        screen = base64.b64encode(encoded.getvalue()).decode()
        if pixels:
            screen = [[list(COLORS[self._answer])] * 16] * 16
        return ColorObservation(message=f"Game {seed}", screen=screen, metadata={"colors": list(COLORS)})

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.color == "crash":
            raise ValueError("the game has crashed")
        if action.color == "die":
            os._exit(3)
        if action.color == "hang":
            time.sleep(5)
        right = action.color == self._answer
        done = right or self._state.step_count == 2
        reward = None if self._unrewarded else float(right)
        return ColorObservation(message="Wrong, again.", done=done, reward=reward)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sessions", type=int, default=64)
    options = parser.parse_args()
    app = create_app(ColorEnvironment, ColorAction, ColorObservation, max_concurrent_envs=options.sessions)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")
