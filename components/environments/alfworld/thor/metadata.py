"""The part of a player's answer that we and alfworld read, and the error for a player that fails."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from armature.components.contracts.errors import ArmatureError


class PlayerError(ArmatureError):
    """AI2-THOR's player died, did not answer in time, gave an invalid answer, or refused an action.

    The episode fails, and the player is replaced.
    """

    code = "player_failed"


LONGEST_SIDE = 4096
"""Largest width and height of a frame in pixels."""

Channel = Annotated[int, Field(ge=0, le=255)]


class _MetadataPart(BaseModel):
    """Base class for the parts of a player's answer. Types are checked strictly, and other keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Point(_MetadataPart):
    x: FiniteFloat
    y: FiniteFloat
    z: FiniteFloat


class SimObject(_MetadataPart):
    objectId: str
    objectType: str
    visible: bool
    position: Point
    receptacle: bool
    pickupable: bool
    toggleable: bool
    isToggled: bool
    dirtyable: bool = False
    isDirty: bool = False
    parentReceptacles: list[str] | None
    receptacleObjectIds: list[str] | None


class HeldObject(_MetadataPart):
    objectId: str
    objectType: str


class Pose(_MetadataPart):
    position: Point
    cameraHorizon: FiniteFloat


class ObjectColor(_MetadataPart):
    name: str
    color: Annotated[list[Channel], Field(min_length=3, max_length=3)]


class AgentMetadata(_MetadataPart):
    screenWidth: int = Field(gt=0, le=LONGEST_SIDE)
    screenHeight: int = Field(gt=0, le=LONGEST_SIDE)
    sceneName: str
    lastAction: str | None
    lastActionSuccess: bool
    errorMessage: str | None
    errorCode: str | None
    actionReturn: Any
    thirdPartyCameras: list[Any] | None
    objects: list[SimObject]
    inventoryObjects: list[HeldObject]
    colors: list[ObjectColor] | None
    agent: Pose


class PlayerMetadata(_MetadataPart):
    """A player's answer, which has exactly one agent, because we never request more."""

    sequenceId: int
    activeAgentId: int
    agents: Annotated[list[AgentMetadata], Field(min_length=1, max_length=1)]
