"""A player of AI2-THOR: the real program, alfworld's environment around it, and where it runs."""

from __future__ import annotations

import ctypes.util
import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import alfworld.agents
import numpy as np
from ai2thor.controller import Controller
from ai2thor.platform import CloudRendering
from ai2thor.server import Event
from ai2thor.wsgi_server import WsgiServer
from alfworld.env import tasks
from alfworld.env.thor_env import ThorEnv

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.alfworld.thor.actions import Release, translate
from armature.components.environments.alfworld.thor.agent import ThorAgent
from armature.components.environments.alfworld.thor.metadata import PlayerError
from armature.components.environments.alfworld.thor.server import PlayerServer
from armature.components.machine.process import Program, Scratch

PLAYER_VARIABLE = "ARMATURE_THOR_PLAYER"
ANSWER_SECONDS, START_SECONDS = 100.0, 300.0
_REWARDS = Path(alfworld.agents.__path__[0]) / "config" / "rewards.json"


def place(
    release: Release,
    environment: Mapping[str, str] = os.environ,
    find_library: Callable[[str], str | None] = ctypes.util.find_library,
) -> dict[str, Any]:
    """Which program plays and on which screen, as arguments of ai2thor's `Controller`.

    ARMATURE_THOR_PLAYER names an executable; without it ai2thor fetches the release that it was made for. With a
    DISPLAY that is drawn on it, else off-screen with Vulkan.

    Raises:
        ConfigurationError: there is nothing to render on, or the release is one that ai2thor cannot fetch.
    """
    display, program = environment.get("DISPLAY"), environment.get(PLAYER_VARIABLE)
    served = {"server_class": WsgiServer} if release == "2.1" else {}
    if program:
        if not os.access(program, os.X_OK) or Path(program).is_dir():
            raise ConfigurationError(
                "AI2-THOR's player is not a program", code="player_not_executable", where=f"{PLAYER_VARIABLE}={program}"
            )
        # A player that draws off-screen looks at no display, but ai2thor searches for one unless it is told.
        return {"local_executable_path": program, "x_display": display or ":0", **served}
    if release == "2.1":
        raise ConfigurationError(
            "ai2thor's Python package cannot fetch the player of 2.1",
            code="player_not_downloadable",
            where="player = '2.1'",
            remedy=f"set {PLAYER_VARIABLE} to its executable, or choose player = '5.0'",
        )
    if display:
        return {"x_display": display, **served}
    if find_library("vulkan") is None:
        raise ConfigurationError(
            "AI2-THOR's player has nothing to draw on: there is no DISPLAY, and Vulkan is not installed",
            code="display_missing",
            remedy="apt-get install libvulkan1 (and a GPU with its driver), or start an X server and set DISPLAY",
        )
    return {"platform": CloudRendering, **served}


class _Translated(Controller):
    """The lowest `step`, below alfworld's, which calls it by way of `super()`."""

    server: Any
    release: Release
    failure: PlayerError | None

    def step(self, action: str | Mapping[str, Any] | None = None, **arguments: Any) -> Event:
        failing = arguments.pop("raise_for_failure", False)
        asked = {**(action if isinstance(action, Mapping) else {"action": action}), **arguments}
        try:
            return super().step(translate(asked, self.release), raise_for_failure=failing)
        except PlayerError as error:
            self.failure = error
            raise
        except Exception as error:
            if asked["action"] == "GetScenesInBuild" and isinstance(error, ValueError):
                raise  # ai2thor takes it as a sign that the player is an old one
            # ai2thor says which action it was in place of what went wrong, which is the error's context.
            cause = error.__context__
            self.failure = cause if isinstance(cause, PlayerError) else _refused(asked, error)
            raise self.failure from error


class ThorPlayer(ThorEnv, _Translated):
    """alfworld's environment on a player that is started once and then plays one episode after another.

    `failure` is what made the player unusable: alfworld's agents catch everything, so it has to be looked at.

    Raises:
        ConfigurationError: the player is unavailable or cannot be started here.
        PlayerError: it was started, and did not do what a player does.
    """

    def __init__(
        self,
        release: Release,
        *,
        width: int,
        height: int,
        answer_seconds: float = ANSWER_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        # ai2thor's constructor ends with a reset, so everything that reset and step look at comes first.
        self.release, self.failure = release, None
        self.task, self.smooth_nav, self.save_frames_to_disk = None, False, False
        self.reset_states()
        self._folder = Scratch()
        where = place(release)
        try:
            Controller.__init__(
                self,
                quality="MediumCloseFitShadows",
                scene="FloorPlan1",  # 2.1 cannot list its scenes, and ai2thor would take the first of the list
                width=width,
                height=height,
                server_timeout=answer_seconds,
                server_start_timeout=start_seconds,
                **where,
            )
        except BaseException as error:
            log = self._log()
            self.end()
            with suppress(Exception):  # what was not begun cannot be stopped
                self.stop()
            if isinstance(error, PlayerError) or not isinstance(error, Exception):
                raise
            raise ConfigurationError(
                f"AI2-THOR's player cannot be started: {str(error)[:1000]}",
                code="player_not_started",
                where=log,
                remedy="ai2thor fetches its player when it is first used, which needs the network once; "
                f"without one set {PLAYER_VARIABLE} to the executable of an unpacked player",
            ) from error

    def reset(self, scene: str | None = None, **initial: Any) -> Event:
        """Load `scene`, as it is without any task.

        Raises:
            PlayerError: the player has no such scene.
        """
        self.task = None
        self.reset_states()
        try:
            return Controller.reset(self, scene, **initial)
        except ValueError as error:
            raise PlayerError(str(error).strip().partition("\n")[0], code="unknown_scene") from error

    def step(self, action: str | Mapping[str, Any] | None = None, smooth_nav: bool = False, **arguments: Any) -> Event:
        """One action, by its name and arguments or as a dict of both, with alfworld's bookkeeping."""
        failing = arguments.pop("raise_for_failure", False)
        asked = {**(action if isinstance(action, Mapping) else {"action": action}), **arguments}
        event = ThorEnv.step(self, asked, smooth_nav)
        if failing and not event:
            raise _refused(asked, event.metadata["errorMessage"])
        return event

    def begin(self, trajectory: Mapping[str, Any], goal: str, names: Mapping[str, str]) -> ThorAgent:
        """Set up the scene, the objects, the agent and the goal that `trajectory` (traj_data.json) describes.

        Raises:
            PlayerError: the player cannot do what it says.
        """
        scene = trajectory["scene"]
        self.reset(f"FloorPlan{scene['scene_num']}")
        self.restore_scene(scene["object_poses"], scene["object_toggles"], scene["dirty_and_empty"])
        if not self.last_event:
            raise _refused({"action": "SetObjectPoses"}, self.last_event.metadata["errorMessage"])
        self.step(scene["init_action"], raise_for_failure=True)
        kind = getattr(tasks, trajectory["task_type"].replace("_", " ").title().replace(" ", "") + "Task")
        # Only the rewards for subgoals, which we do not use, look at the scene's graph: 0.3 s to build.
        without_graph = type(kind.__name__, (kind,), {"load_nav_graph": lambda task: None})
        plan: dict[str, Any] = {"high_pddl": [], "low_actions": []}
        self.task = without_graph({"plan": plan, **trajectory}, self, SimpleNamespace(reward_config=_REWARDS))
        return ThorAgent(self, trajectory, goal, names)

    def frame(self) -> np.ndarray:
        """What the agent sees: (height, width, 3) uint8 in the order red, green, blue.

        Raises:
            PlayerError: the player sent none, or one of another size than was asked for.
        """
        return self._image(self.last_event.frame, "frame")

    def segmentation(self) -> np.ndarray:
        """The color of whatever is seen in each pixel: (height, width, 3) uint8. Raises as `frame` does."""
        return self._image(self.last_event.instance_segmentation_frame, "segmentation")

    def _image(self, image: np.ndarray | None, what: str) -> np.ndarray:
        if image is None or image.shape != (self.height, self.width, 3):
            got = "none" if image is None else f"{image.shape[1]}x{image.shape[0]}"
            self.failure = PlayerError(
                f"the {what} should have {self.width}x{self.height} pixels, AI2-THOR's player sent {got}",
                code="frame_size_mismatch",
            )
            raise self.failure
        return image

    def goal_share(self) -> float:
        """Conditions of the goal that hold now, as a share of all of them."""
        met, of = self.get_goal_conditions_met()
        return float(met) / float(of)

    def end(self) -> None:
        """Stop the program. Safe to call at any time, from any thread, and again."""
        if self.server is not None and self.server.unity_proc is not None:
            self.server.unity_proc.kill()

    def prune_releases(self) -> None:
        """Which players a user keeps is not ours to decide."""

    def _build_server(self, host: str, port: int, width: int, height: int) -> None:
        if self.release == "2.1":
            super()._build_server(host, port, width, height)
        elif self.server is None:
            self.server = PlayerServer(width=width, height=height, timeout=self.server_timeout)

    def _start_unity_thread(
        self, env: dict[str, str], width: int, height: int, server_params: Mapping[str, str], image_name: str | None
    ) -> None:
        """Start the player under our guard, so that it ends when we do; its log lies in a folder of ours."""
        self.server.client_token = str(uuid.uuid4())
        variables = {
            "AI2THOR_CLIENT_TOKEN": self.server.client_token,
            "AI2THOR_SERVER_TYPE": self.server.server_type,
            "AI2THOR_SERVER_SIDE_SCREENSHOT": "True",
            **{f"AI2THOR_{name.upper()}": value for name, value in server_params.items()},
            **self._build.platform.launch_env(self.width, self.height, self.x_display),
        }
        command = self.unity_command(width, height, self.headless)
        program = Program(command, log=Path(self._folder.name) / "player.log", env=variables, grace=1.0)
        self.server.unity_proc = _Process(program)

    def _log(self) -> str:
        process = self.server.unity_proc if self.server is not None else None
        return process.program.tail(10) if process is not None else ""


class _Process:
    """A guarded program in the shape of `subprocess.Popen`, which ai2thor's server and controller expect."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @property
    def returncode(self) -> int | None:
        return self.program.returncode

    def poll(self) -> int | None:
        return self.program.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.program.wait(timeout)

    def kill(self) -> None:
        self.program.stop()


def _refused(action: Mapping[str, Any], why: object) -> PlayerError:
    return PlayerError(
        f"AI2-THOR's player refuses {action['action']}: {str(why)[:500]}",
        code="action_refused",
        where=json.dumps(action, default=str)[:300],
    )
