"""A THOR task's payload: the game, and the scene that it is played in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from components.contracts.episodes import Task
from components.contracts.errors import DataError
from components.environments.alfworld.games import Kind


class _Part(BaseModel):
    """Other keys of ALFRED's files are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow")


class Vector(_Part):
    x: FiniteFloat
    y: FiniteFloat
    z: FiniteFloat


class ObjectPose(_Part):
    objectName: str
    position: Vector
    rotation: Vector


class InitAction(_Part):
    action: Literal["TeleportFull"]
    x: FiniteFloat
    y: FiniteFloat
    z: FiniteFloat
    rotation: FiniteFloat
    horizon: FiniteFloat


class Scene(_Part):
    scene_num: Annotated[int, Field(ge=1, le=430)]
    object_poses: list[ObjectPose]
    object_toggles: list[dict[str, Any]]
    dirty_and_empty: bool
    init_action: InitAction


class Targets(_Part):
    object_target: str
    parent_target: str
    toggle_target: str
    mrecep_target: str
    object_sliced: bool


class Trajectory(_Part):
    """The part of ALFRED's traj_data.json that sets up a scene and its goal."""

    task_type: Kind
    pddl_params: Targets
    scene: Scene


class ThorGame(_Part):
    problem: str
    goal: Annotated[str, Field(min_length=1)]
    trajectory: Trajectory


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
            where=f"task {task.task_id}",
            remedy="list the tasks with the environment alfworld/thor, which keeps each game's scene",
        ) from error
