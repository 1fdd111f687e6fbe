"""What a game is, its payload as a task, and the settings of where games come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt

from armature.components.contracts.settings import Settings

Source = Literal["train", "valid_seen", "valid_unseen"]
Kind = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
Room = Literal["Kitchen", "LivingRoom", "Bedroom", "Bathroom"]
ROOMS: tuple[Room, ...] = get_args(Room)
SOURCES: tuple[Source, ...] = get_args(Source)
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Game:
    """One game. `problem` is PDDL of ALFRED's domain; `plan` is commands that win it, empty where none is known.

    `trajectory` is what AI2-THOR needs to set the same scene up (the content of traj_data.json).
    """

    name: str
    kind: str
    scene: int
    source: Source
    problem: str
    goal: str
    plan: tuple[str, ...]
    trajectory: Mapping[str, Any]

    def payload(self) -> dict[str, Any]:
        """The game as a text task's payload, which leaves the trajectory out."""
        return {
            "game": self.name,
            "kind": self.kind,
            "scene": self.scene,
            "source": self.source,
            "problem": self.problem,
            "goal": self.goal,
            "plan": list(self.plan),
        }


class GeneratedGames(Settings):
    """Games made from the scenes' layouts that come with alfworld; no data is needed."""

    source: Literal["generated"] = Field(description="generated: made from a seed.")
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1, description="Task types; games take turns through them.")
    rooms: tuple[Room, ...] = Field(ROOMS, min_length=1, description="Rooms that games may play in.")
    density: float = Field(0.5, gt=0, le=1, description="Chance that an object that a scene may hold is there.")
    most_instances: PositiveInt = Field(2, description="Most copies of an object.")
    most_receptacles: PositiveInt = Field(
        20, description="Most receptacles of a room; the others and what is on them are left out. Rooms have up to 40."
    )


class FolderGames(Settings):
    """Games in ALFWorld's own layout: its data, or what the stage alfworld-games has written."""

    source: Literal["folder"] = Field(description="folder: read from files.")
    path: str = Field(min_length=1, description="The folder that holds train, valid_seen and valid_unseen.")
    digest: str = Field("", description="Digest of the games' files. Leave it empty to be told what it is.")
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1, description="Task types; games of others are left out.")
    replaced_grammars: tuple[str, ...] = Field(
        (),
        description="SHA-256 of grammars that games may bring besides the installed one. A game's grammar is never "
        "used: such a game is played with the installed one.",
    )


GamesSettings = Annotated[GeneratedGames | FolderGames, Field(discriminator="source")]
