"""A game of ALFWorld, the settings of the source of games, and checks of a game's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt

from armature.components.contracts.errors import DataError
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
    """A game of ALFWorld.

    `problem` is PDDL in ALFRED's domain. `plan` holds commands that win the game; it is empty if no plan is available.
    `trajectory` is the content of traj_data.json, from which AI2-THOR sets up the same scene.
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
        """Return the game as a task's payload, without the trajectory."""
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
    """Settings of games that are generated from the scenes' layouts in alfworld, without any data."""

    source: Literal["generated"]
    """generated: make games from a seed."""
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1)
    """Task types; consecutive games take turns through them."""
    rooms: tuple[Room, ...] = Field(ROOMS, min_length=1)
    """Rooms in which games may take place."""
    density: float = Field(0.5, gt=0, le=1)
    """Probability that a possible object is in a scene."""
    most_instances: PositiveInt = 2
    """Most copies of an object."""
    most_receptacles: PositiveInt = 20
    """Most receptacles of a room. Other receptacles and the objects on them are left out. Rooms have up to 40."""


class FolderGames(Settings):
    """Settings of games in ALFWorld's folder layout: its data, or the output of the stage alfworld-games."""

    source: Literal["folder"]
    """folder: read games from files."""
    path: str = Field(min_length=1)
    """Folder that contains train, valid_seen and valid_unseen."""
    digest: str = ""
    """Digest of the games' files. If it is empty, the error message shows the actual value."""
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1)
    """Task types; games of other types are left out."""
    replaced_grammars: tuple[str, ...] = ()
    """SHA-256 of grammars, besides the installed one, that games may contain. Such games are played with the installed
    grammar all the same; a game's own grammar is never used."""


GamesSettings = Annotated[GeneratedGames | FolderGames, Field(discriminator="source")]


# --- Checks of a game's text before the engine gets it: a PDDL problem of a fixed shape, and a plain sentence ---

LONGEST_PROBLEM = 2**20
"""Largest number of characters in a problem."""
LONGEST_NAME = 150
"""Largest number of characters in a name.

fast-downward's library copies an operator's name and up to six arguments into 1,024 bytes.
"""

DEEPEST = 32
"""Largest number of levels of nested parentheses in a problem."""
_GOAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,'-]{0,299}")
_TEXT = re.compile(r"[ \t\r\n!-~]*")
_TOKEN = re.compile(r"[()]|[^\s()]+")
_NAME = re.compile(r"[A-Za-z0-9_?=:.+-]+")
_SECTIONS = ["problem", ":domain", ":objects", ":init", ":goal"]
_REMEDY = "use games made by alfworld's tools or by the stage alfworld-games"


def check_goal(goal: object, *, where: str) -> str:
    """Return `goal` if it is a plain sentence. Braces, brackets and quotes are refused: grammars use them.

    Raises:
        DataError: `goal` is not a plain sentence.
    """
    if not isinstance(goal, str) or _GOAL.fullmatch(goal) is None:
        raise DataError(f"not a goal sentence: {str(goal)[:80]!r}", code="invalid_goal", where=where, remedy=_REMEDY)
    return goal


def check_problem(problem: object, *, where: str) -> str:
    """Return `problem` if it is a PDDL problem in ALFRED's domain with the names and sections of such problems.

    Raises:
        DataError: `problem` has another form; the message says what is wrong.
    """
    reason = _defect(problem)
    if reason is not None:
        raise DataError(f"not a PDDL problem of ALFRED: {reason}", code="invalid_problem", where=where, remedy=_REMEDY)
    assert isinstance(problem, str)
    return problem


def _defect(problem: object) -> str | None:
    if not isinstance(problem, str):
        return f"a {type(problem).__name__}"
    if len(problem) > LONGEST_PROBLEM:
        return f"{len(problem)} characters, more than {LONGEST_PROBLEM}"
    if _TEXT.fullmatch(problem) is None:
        return "characters that are not ASCII"
    depth, sections, previous, closed = 0, [], "", False
    for match in _TOKEN.finditer(problem):
        token = match[0]
        if closed:
            return "text after its end"
        if token == "(":
            depth += 1
            if depth > DEEPEST:
                return f"more than {DEEPEST} levels"
        elif token == ")":
            depth -= 1
            closed = depth <= 0
        elif len(token) > LONGEST_NAME:
            return f"a name of {len(token)} characters"
        elif _NAME.fullmatch(token) is None:
            return f"the name {token[:40]!r}"
        elif previous == "(" and depth == 2:
            sections.append(token.lower())
        elif depth == 1 and token != "define":
            return f"{token[:40]!r} outside of its sections"
        elif depth == 2 and sections[-1:] == [":domain"] and token.lower() != "alfred":
            return f"the domain {token[:40]!r}"
        elif depth == 0:
            return f"{token[:40]!r} before its beginning"
        previous = token
    if not closed:
        return "its parentheses do not match"
    if sections not in (_SECTIONS, [*_SECTIONS, ":metric"]):
        return f"the sections {sections}, expected {_SECTIONS}"
    return None
