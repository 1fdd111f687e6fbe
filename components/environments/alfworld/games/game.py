"""What a game is, its payload as a task, and the settings of where games come from."""

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

    source: Literal["generated"]
    """generated: made from a seed."""
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1)
    """Task types; games take turns through them."""
    rooms: tuple[Room, ...] = Field(ROOMS, min_length=1)
    """Rooms that games may play in."""
    density: float = Field(0.5, gt=0, le=1)
    """Chance that an object that a scene may hold is there."""
    most_instances: PositiveInt = 2
    """Most copies of an object."""
    most_receptacles: PositiveInt = 20
    """Most receptacles of a room; the others and what is on them are left out. Rooms have up to 40."""


class FolderGames(Settings):
    """Games in ALFWorld's own layout: its data, or what the stage alfworld-games has written."""

    source: Literal["folder"]
    """folder: read from files."""
    path: str = Field(min_length=1)
    """The folder that holds train, valid_seen and valid_unseen."""
    digest: str = ""
    """Digest of the games' files. Leave it empty to be told what it is."""
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1)
    """Task types; games of others are left out."""
    replaced_grammars: tuple[str, ...] = ()
    """SHA-256 of grammars that games may bring besides the installed one. A game's grammar is never used: such a game
    is played with the installed one."""


GamesSettings = Annotated[GeneratedGames | FolderGames, Field(discriminator="source")]


# What a game file or a task may hand to the engine: a PDDL problem of known shape, and a plain sentence.

LONGEST_PROBLEM = 2**20
LONGEST_NAME = 150
"""fast-downward's library copies an operator, a name and up to six arguments, into 1,024 bytes."""

DEEPEST = 32
_GOAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,'-]{0,299}")
_TEXT = re.compile(r"[ \t\r\n!-~]*")
_TOKEN = re.compile(r"[()]|[^\s()]+")
_NAME = re.compile(r"[A-Za-z0-9_?=:.+-]+")
_SECTIONS = ["problem", ":domain", ":objects", ":init", ":goal"]
_REMEDY = "take games that alfworld's own tools, or the stage alfworld-games, have made"


def check_goal(goal: object, *, where: str) -> str:
    """`goal` if it is a plain sentence; braces, brackets and quotes would mean something in a grammar.

    Raises:
        DataError: it is not.
    """
    if not isinstance(goal, str) or _GOAL.fullmatch(goal) is None:
        raise DataError(f"not a goal sentence: {str(goal)[:80]!r}", code="invalid_goal", where=where, remedy=_REMEDY)
    return goal


def check_problem(problem: object, *, where: str) -> str:
    """`problem` if it is one PDDL problem of ALFRED's domain, of names and sections that such problems have.

    Raises:
        DataError: it is not; with the reason.
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
