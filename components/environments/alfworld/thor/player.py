"""AI2-THOR's player program, with alfworld's environment around it."""

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
"""Time limits for a player's answer and for its start."""
_REWARDS = Path(alfworld.agents.__path__[0]) / "config" / "rewards.json"


def launch_arguments(
    release: Release,
    environment: Mapping[str, str] = os.environ,
    find_library: Callable[[str], str | None] = ctypes.util.find_library,
) -> dict[str, Any]:
    """Return the program and the display of a player, as arguments of ai2thor's `Controller`.

    ARMATURE_THOR_PLAYER names the executable; without it ai2thor downloads its own release. If DISPLAY is set, the
    player draws on that display, otherwise off-screen with Vulkan.

    Raises:
        ConfigurationError: there is neither a display nor Vulkan, or ai2thor cannot download the release.
    """
    display, program = environment.get("DISPLAY"), environment.get(PLAYER_VARIABLE)
    served = {"server_class": WsgiServer} if release == "2.1" else {}
    if program:
        if not os.access(program, os.X_OK) or Path(program).is_dir():
            raise ConfigurationError(
                "AI2-THOR's player is not an executable program",
                code="player_not_executable",
                where=f"{PLAYER_VARIABLE}={program}",
            )
        # A player that draws off-screen uses no display, but ai2thor searches for one unless it gets a name.
        return {"local_executable_path": program, "x_display": display or ":0", **served}
    if release == "2.1":
        raise ConfigurationError(
            "ai2thor's Python package cannot download the player 2.1",
            code="player_not_downloadable",
            where="player = '2.1'",
            remedy=f"set {PLAYER_VARIABLE} to its executable, or choose player = '5.0'",
        )
    if display:
        return {"x_display": display, **served}
    if find_library("vulkan") is None:
        raise ConfigurationError(
            "AI2-THOR's player cannot draw: DISPLAY is not set, and Vulkan is not installed",
            code="display_missing",
            remedy="apt-get install libvulkan1 (and a GPU with its driver), or start an X server and set DISPLAY",
        )
    return {"platform": CloudRendering, **served}


class _Translated(Controller):
    """A controller whose `step`, which alfworld's `step` calls, translates actions for the player's release."""

    server: Any
    release: Release
    failure: PlayerError | None

    def step(self, action: str | Mapping[str, Any] | None = None, **arguments: Any) -> Event:
        raise_for_failure = arguments.pop("raise_for_failure", False)
        request = {**(action if isinstance(action, Mapping) else {"action": action}), **arguments}
        try:
            return super().step(translate(request, self.release), raise_for_failure=raise_for_failure)
        except PlayerError as error:
            self.failure = error
            raise
        except Exception as error:
            if request["action"] == "GetScenesInBuild" and isinstance(error, ValueError):
                raise  # ai2thor expects this error from an old player
            # ai2thor's error only names the action; the cause is the error's context.
            cause = error.__context__
            self.failure = cause if isinstance(cause, PlayerError) else _refused(request, error)
            raise self.failure from error


class ThorPlayer(ThorEnv, _Translated):
    """alfworld's environment on a player that starts once and then plays one episode after another.

    `failure` is the error that made the player unusable. Check it after each call of alfworld's agents, which catch
    every exception.

    Raises:
        ConfigurationError: the player is not available or cannot be started on this machine.
        PlayerError: the player started and then failed.
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
        # ai2thor's constructor ends with a reset, so set everything that reset and step read before it.
        self.release, self.failure = release, None
        self.task, self.smooth_nav, self.save_frames_to_disk = None, False, False
        self.reset_states()
        self._folder = Scratch()
        launch = launch_arguments(release)
        try:
            Controller.__init__(
                self,
                quality="MediumCloseFitShadows",
                scene="FloorPlan1",  # without it ai2thor takes the first scene of a list, which 2.1 cannot give
                width=width,
                height=height,
                server_timeout=answer_seconds,
                server_start_timeout=start_seconds,
                **launch,
            )
        except BaseException as error:
            log = self._log()
            self.end()
            with suppress(Exception):  # stopping fails for the parts that have not started
                self.stop()
            if isinstance(error, PlayerError) or not isinstance(error, Exception):
                raise
            raise ConfigurationError(
                f"AI2-THOR's player cannot be started: {str(error)[:1000]}",
                code="player_not_started",
                where=log,
                remedy="ai2thor downloads its player at the first use, which needs the network once; "
                f"without a network set {PLAYER_VARIABLE} to the executable of an unpacked player",
            ) from error

    def reset(self, scene: str | None = None, **initial: Any) -> Event:
        """Load a scene in its initial state, without a task.

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
        """Run an action, given by name and arguments or as a dict of both, with alfworld's bookkeeping."""
        raise_for_failure = arguments.pop("raise_for_failure", False)
        request = {**(action if isinstance(action, Mapping) else {"action": action}), **arguments}
        event = ThorEnv.step(self, request, smooth_nav)
        if raise_for_failure and not event:
            raise _refused(request, event.metadata["errorMessage"])
        return event

    def begin(self, trajectory: Mapping[str, Any], goal: str, names: Mapping[str, str]) -> ThorAgent:
        """Set up the scene, objects, agent and goal of `trajectory` (traj_data.json), and return the agent.

        Raises:
            PlayerError: the player cannot set them up.
        """
        scene = trajectory["scene"]
        self.reset(f"FloorPlan{scene['scene_num']}")
        self.restore_scene(scene["object_poses"], scene["object_toggles"], scene["dirty_and_empty"])
        if not self.last_event:
            raise _refused({"action": "SetObjectPoses"}, self.last_event.metadata["errorMessage"])
        self.step(scene["init_action"], raise_for_failure=True)
        kind = getattr(tasks, trajectory["task_type"].replace("_", " ").title().replace(" ", "") + "Task")
        # Skip the scene's navigation graph: it takes 0.3 s to build, and only rewards for subgoals read it.
        without_graph = type(kind.__name__, (kind,), {"load_nav_graph": lambda task: None})
        plan: dict[str, Any] = {"high_pddl": [], "low_actions": []}
        self.task = without_graph({"plan": plan, **trajectory}, self, SimpleNamespace(reward_config=_REWARDS))
        return ThorAgent(self, trajectory, goal, names)

    def frame(self) -> np.ndarray:
        """Return the agent's camera image, (height, width, 3) uint8 in the order red, green, blue.

        Raises:
            PlayerError: the player sent no image, or one of another size.
        """
        return self._image(self.last_event.frame, "frame")

    def segmentation(self) -> np.ndarray:
        """Return the color of the object in each pixel, (height, width, 3) uint8. Raises the same errors as `frame`."""
        return self._image(self.last_event.instance_segmentation_frame, "segmentation")

    def _image(self, image: np.ndarray | None, what: str) -> np.ndarray:
        if image is None or image.shape != (self.height, self.width, 3):
            actual = "none" if image is None else f"{image.shape[1]}x{image.shape[0]}"
            self.failure = PlayerError(
                f"the {what} should have {self.width}x{self.height} pixels, AI2-THOR's player sent {actual}",
                code="frame_size_mismatch",
            )
            raise self.failure
        return image

    def goal_share(self) -> float:
        """Return the share of the goal's conditions that hold now."""
        met, total = self.get_goal_conditions_met()
        return float(met) / float(total)

    def end(self) -> None:
        """Stop the program. May be called at any time, from any thread, and more than once."""
        if self.server is not None and self.server.unity_proc is not None:
            self.server.unity_proc.kill()

    def prune_releases(self) -> None:
        """Do nothing. ai2thor would delete other downloaded players, which the user may still need."""

    def _build_server(self, host: str, port: int, width: int, height: int) -> None:
        if self.release == "2.1":
            super()._build_server(host, port, width, height)
        elif self.server is None:
            self.server = PlayerServer(width=width, height=height, timeout=self.server_timeout)

    def _start_unity_thread(
        self, env: dict[str, str], width: int, height: int, server_params: Mapping[str, str], image_name: str | None
    ) -> None:
        """Start the player as a program that ends with our process, with its log in our scratch folder."""
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
    """A `Program` with the interface of `subprocess.Popen` that ai2thor's server and controller use."""

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
