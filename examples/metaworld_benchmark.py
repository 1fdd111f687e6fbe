"""Meta-World as a benchmark of vla-eval, as LeRobot plays it: its camera, its instructions, its states and seeds.

It runs where `pip install vla-eval metaworld packaging` was done, without Armature. `armature run evaluate/metaworld`
plays it, and so does `vla-eval run` with `benchmark: metaworld_benchmark:MetaWorld`.
"""

from typing import Any

import metaworld
import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.specs import IMAGE_RGB, LANGUAGE, POSITION_DELTA, RAW, DimSpec

WORDS = {
    "reach-v3": "Reach a goal position",
    "push-v3": "Push the puck to a goal",
    "pick-place-v3": "Pick and place a puck to a goal",
    "door-open-v3": "Open a door with a revolving joint",
    "drawer-open-v3": "Open a drawer",
    "drawer-close-v3": "Push and close a drawer",
    "button-press-topdown-v3": "Press a button from the top",
    "peg-insert-side-v3": "Insert a peg sideways",
    "window-open-v3": "Push and open a window",
    "window-close-v3": "Push and close a window",
}
"""LeRobot's instructions for the tasks of MT10. Other tasks get their name in words."""


class MetaWorld(StepBenchmark):
    """The start of episode k has the seed `seed` + k.

    resolution: height and width of the images. full_state: send all 39 numbers of an observation, as Meta-World's
    scripted policies need, and not only the hand's position and the opening of the gripper.
    """

    def __init__(self, seed: int = 0, resolution: int = 480, full_state: bool = False) -> None:
        super().__init__()
        self._seed, self._resolution, self._numbers = seed, resolution, 39 if full_state else 4
        self._name = ""
        self._env: Any = None

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": name, "suite": "metaworld"} for name in metaworld.ALL_V3_ENVIRONMENTS]

    def reset(self, task: dict[str, Any]) -> Any:
        if self._name != task["name"]:
            self.cleanup()
            self._name, self._env = task["name"], self._made(task["name"])
        seed = self._seed + task["episode_idx"]
        self._env.seed(seed)
        return self._env.reset(seed=seed)[0]

    def _made(self, name: str) -> Any:
        tasks = metaworld.MT1(name, seed=42)
        size = {"width": self._resolution, "height": self._resolution}
        env = tasks.train_classes[name](render_mode="rgb_array", camera_name="corner2", **size)
        env.set_task(tasks.train_tasks[0])
        env.model.cam_pos[2] = [0.75, 0.075, 0.7]
        env.reset()
        env._freeze_rand_vec, env.seeded_rand_vec = False, True  # each reset draws the goal, from its seed
        return env

    def step(self, action: dict[str, Any]) -> StepResult:
        seen, reward, ended, cut, info = self._env.step(np.clip(action["actions"], -1, 1))
        return StepResult(
            seen, float(reward), bool(info["success"] or ended or cut), {"success": bool(info["success"])}
        )

    def make_obs(self, raw_obs: Any, task: dict[str, Any]) -> dict[str, Any]:
        image = np.ascontiguousarray(self._env.render()[::-1, ::-1])  # the camera is upside down
        words = WORDS.get(task["name"], task["name"].removesuffix("-v3").replace("-", " "))
        return {"images": {"corner2": image}, "state": raw_obs[: self._numbers], "task_description": words}

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": step_result.info.get("success", False)}

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": 500}

    def get_action_spec(self) -> dict[str, DimSpec]:
        return {"position": POSITION_DELTA, "gripper": DimSpec("gripper", 1, "continuous_close_positive", (-1, 1))}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        return {"corner2": IMAGE_RGB, "language": LANGUAGE, "state": RAW}

    def cleanup(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
