"""A game's payload as a task in AI2-THOR, and the reward of each turn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from armature.components.contracts.episodes import Task
from armature.components.contracts.errors import DataError
from armature.components.contracts.settings import Settings
from armature.components.environments.alfworld.games.game import Kind

# A THOR task's payload: the game, and the scene that it is played in.


class _AlfredPart(BaseModel):
    """Other keys of ALFRED's files are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


class Vector(_AlfredPart):
    x: FiniteFloat
    y: FiniteFloat
    z: FiniteFloat


class ObjectPose(_AlfredPart):
    objectName: str
    position: Vector
    rotation: Vector


class InitAction(_AlfredPart):
    action: Literal["TeleportFull"]
    x: FiniteFloat
    y: FiniteFloat
    z: FiniteFloat
    rotation: FiniteFloat
    horizon: FiniteFloat


class AlfredScene(_AlfredPart):
    scene_num: Annotated[int, Field(ge=1, le=430)]
    object_poses: list[ObjectPose]
    object_toggles: list[dict[str, Any]]
    dirty_and_empty: bool
    init_action: InitAction


class Targets(_AlfredPart):
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
    problem: str
    goal: Annotated[str, Field(min_length=1)]
    trajectory: AlfredTrajectory


def thor_game(task: Task) -> ThorGame:
    """
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
            remedy="list the tasks with the environment alfworld/thor, which keeps each game's scene",
        ) from error


# What a turn in AI2-THOR earns.


class TerminalReward(Settings):
    """The win alone."""

    name: Literal["terminal"]
    """terminal: nothing but the win is rewarded."""
    won_weight: float = 10.0
    """Reward for the win."""


class PotentialReward(Settings):
    """The win, and each turn's change of the share of the goal's conditions that hold.

    Over an episode the changes sum up to the last share minus the first, however long a share was held; what is
    undone is taken back.
    """

    name: Literal["potential"]
    """potential: progress is rewarded as well, when it is made."""
    won_weight: float = 10.0
    """Reward for the win."""
    progress_weight: float = 1.0
    """Reward for all of the goal's conditions; a part earns its share."""


RewardSettings = Annotated[TerminalReward | PotentialReward, Field(discriminator="name")]


class RewardTracker:
    """The reward parts of one episode's turns. `share` is that of the start, in [0, 1]."""

    def __init__(self, settings: TerminalReward | PotentialReward, share: float) -> None:
        self._progress = isinstance(settings, PotentialReward)
        self._share = share

    def turn(self, share: float, won: bool) -> dict[str, float]:
        """Of a turn after which `share` of the conditions hold."""
        parts = {"won": float(won)}
        if self._progress:
            parts["progress"], self._share = share - self._share, share
        return parts


def weights(settings: TerminalReward | PotentialReward) -> dict[str, float]:
    """The weight of each part."""
    progress = {"progress": settings.progress_weight} if isinstance(settings, PotentialReward) else {}
    return {"won": settings.won_weight, **progress}
