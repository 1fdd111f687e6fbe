"""The payload of a task in AI2-THOR, and the rewards of its turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from armature.components.contracts.episodes import Task
from armature.components.contracts.errors import DataError
from armature.components.contracts.settings import Settings
from armature.components.environments.alfworld.games.game import Kind

# --- The payload: a game and the scene in which it takes place ---


class _AlfredPart(BaseModel):
    """Base class for the parts of ALFRED's files. Types are checked strictly, and other keys pass unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")


class Vector(_AlfredPart):
    """A position or rotation in AI2-THOR's coordinates."""

    x: FiniteFloat
    y: FiniteFloat
    z: FiniteFloat


class ObjectPose(_AlfredPart):
    """Position and rotation of an object at the start of a game."""

    objectName: str
    position: Vector
    rotation: Vector


class InitAction(_AlfredPart):
    """The action that puts the agent at its start."""

    action: Literal["TeleportFull"]
    x: FiniteFloat
    y: FiniteFloat
    z: FiniteFloat
    rotation: FiniteFloat
    horizon: FiniteFloat


class AlfredScene(_AlfredPart):
    """A scene with the poses and states of its objects and the agent's start."""

    scene_num: Annotated[int, Field(ge=1, le=430)]
    object_poses: list[ObjectPose]
    object_toggles: list[dict[str, Any]]
    dirty_and_empty: bool
    init_action: InitAction


class Targets(_AlfredPart):
    """The object types in a game's goal; empty texts for parts that the goal does not have."""

    object_target: str
    parent_target: str
    toggle_target: str
    mrecep_target: str
    object_sliced: bool


class AlfredTrajectory(_AlfredPart):
    """The part of ALFRED's traj_data.json that sets up a scene and its goal."""

    task_type: Kind
    pddl_params: Targets
    scene: AlfredScene


class ThorGame(_AlfredPart):
    """A game's PDDL problem, goal sentence and scene."""

    problem: str
    goal: Annotated[str, Field(min_length=1)]
    trajectory: AlfredTrajectory


def thor_game(task: Task) -> ThorGame:
    """Return a task's payload as a game.

    Raises:
        DataError: the payload is not a game with its scene.
    """
    try:
        return ThorGame.model_validate(dict(task.payload))
    except ValidationError as error:
        raise DataError(
            f"not a game of alfworld/thor: {str(error)[:1000]}",
            code="not_a_thor_game",
            where=f"task {task.task_id}",
            remedy="make the tasks with the environment alfworld/thor, which stores each game's scene",
        ) from error


# --- Rewards ---


class TerminalReward(Settings):
    """Reward only the win."""

    name: Literal["terminal"]
    """terminal: reward only the win."""
    won_weight: float = 10.0
    """Reward for the win."""


class PotentialReward(Settings):
    """Reward the win, and in each turn the change of the share of the goal's conditions that hold.

    Over an episode the changes sum to the last share minus the first, no matter how long a share was held; undoing a
    condition costs its reward.
    """

    name: Literal["potential"]
    """potential: reward progress too, in the turn that makes it."""
    won_weight: float = 10.0
    """Reward for the win."""
    progress_weight: float = 1.0
    """Reward for meeting all of the goal's conditions; a part of them earns its share."""


RewardSettings = Annotated[TerminalReward | PotentialReward, Field(discriminator="name")]


class RewardTracker:
    """The reward parts of an episode's turns. `share`, in [0, 1], is the share of conditions that hold at the start."""

    def __init__(self, settings: TerminalReward | PotentialReward, share: float) -> None:
        self._progress = isinstance(settings, PotentialReward)
        self._share = share

    def turn(self, share: float, won: bool) -> dict[str, float]:
        """Return the reward parts of a turn after which `share` of the conditions hold."""
        parts = {"won": float(won)}
        if self._progress:
            parts["progress"], self._share = share - self._share, share
        return parts


def weights(settings: TerminalReward | PotentialReward) -> dict[str, float]:
    """Return the weight of each reward part."""
    progress = {"progress": settings.progress_weight} if isinstance(settings, PotentialReward) else {}
    return {"won": settings.won_weight, **progress}
