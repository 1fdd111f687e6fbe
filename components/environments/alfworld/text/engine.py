"""alfworld's own text engine, with what it computes again and again kept. Imported in worker processes only.

What a game says and allows is decided where it always is: transitions and goals in fast-downward's library, texts in
textworld's grammar. Kept are things that cannot change during a game. Importing this module changes these packages
for the whole process, because their functions call each other by module and there is nothing to subclass.
"""

from __future__ import annotations

import copy
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import fast_downward
import fast_downward.interface
import textworld
from alfworld.agents.utils.misc import Demangler
from textworld.core import GameState
from textworld.envs import PddlEnv
from textworld.envs.pddl import logic, textgen
from textworld.logic import Action, Placeholder, Variable

from armature.components.environments.alfworld import packaged

# Shared libraries without what is not loaded.

_SEGMENT = struct.Struct("<IIQQQQQQ")


def loadable_part(library: bytes) -> bytes:
    """The beginning of a 64-bit little-endian ELF file up to the end of its last segment.

    The loader needs program headers and segments; sections, debug information above all, come after them. Anything
    that is not such a file is returned as it is.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        return library
    (offset,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    segments = (_SEGMENT.unpack_from(library, offset + index * size) for index in range(count))
    return library[: max(start + length for _, _, start, _, _, length, _, _ in segments)]


KEPT_PROBLEMS = 32
"""Translated problems that are kept, a few MB each: the members of a group play the same one."""

KEPT_TEXTS = 2048
"""Parsed grammar rules that are kept; the installed grammar has about 150."""

NO_PLAN = """begin_version
3
end_version
begin_metric
0
end_metric
1
begin_variable
var0
-1
2
one
other
end_variable
0
begin_state
0
end_state
begin_goal
1
0 0
end_goal
0
0
"""
"""A task of one variable and nothing to do, for the planner that no game here asks."""


@dataclass
class CompiledProblem:
    """What all episodes of a problem share. Actions and commands are filled in as they are first met."""

    task: Any
    sas: str
    entities: dict[str, Any] = field(default_factory=dict)
    actions: dict[int, tuple[str, Any]] = field(default_factory=dict)
    commands: dict[int, str] = field(default_factory=dict)
    typed: dict[tuple[str, ...], str] = field(default_factory=dict)


@lru_cache(KEPT_PROBLEMS)
def prepared(problem: str) -> CompiledProblem:
    arguments = sys.argv
    try:
        return CompiledProblem(*_translate(packaged.domain(), problem))
    finally:
        sys.argv = arguments  # the translator puts its own there


def _pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> tuple[Any, str]:
    kept = prepared(problem)
    return kept.task, NO_PLAN if optimize else kept.sas


def _kept(parse: Callable[..., Any]) -> Callable[..., Any]:
    """`parse` with its results kept; callers change what they get, so each has a copy."""

    @lru_cache(KEPT_TEXTS)
    def once(text: str, options: tuple[tuple[str, Any], ...]) -> Any:
        return parse(text, **dict(options))

    return lambda text, **options: copy.deepcopy(once(text, tuple(options.items())))


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """The original copies entities and variables as well, which nothing changes: half of a step's time."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


_translate = fast_downward.pddl2sas
fast_downward.pddl2sas = _pddl2sas
textgen._parse_and_convert = _kept(textgen._parse_and_convert)
textgen.copy_context = _copy_context
textgen.Rule.parse_conjunctive_query = staticmethod(lru_cache(KEPT_TEXTS)(textgen.Rule.parse_conjunctive_query))


def load_slim_library(scratch: Path) -> None:
    """Let every game load its copy of fast-downward's library without the 31 MB of debug information in it."""
    slim = scratch / "libdownward.so"
    slim.write_bytes(loadable_part(Path(fast_downward.interface.DOWNWARD_LIB_PATH).read_bytes()))
    fast_downward.interface.DOWNWARD_LIB_PATH = str(slim)


@cache
def _logic() -> Any:
    return logic.GameLogic(domain=packaged.domain(), grammar=packaged.grammar())


def game_logic(goal: str) -> Any:
    """The installed grammar with `goal` in it as text: it is not parsed, so nothing in it is run."""
    shared = _logic()
    said = textgen.TerminalSymbol(f"Your task is to: {goal}.")
    made = copy.copy(shared)
    made.grammar = textgen.ContextSensitiveGrammar()
    made.grammar._rules = {**shared.grammar._rules, "task": [textgen.ProductionRule("task", [said])]}
    return made


class EpisodeState(logic.PddlState):
    """Facts of one episode, whose actions are made once for all episodes of the problem."""

    def __init__(self, library: Any, problem: str, game: Any) -> None:
        self.prepared = prepared(problem)
        super().__init__(library, problem, game)

    def all_applicable_actions(self) -> list[Any]:
        operators = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
        self.downward_lib.get_applicable_operators(operators)
        self._operators = {operator.id: operator for operator in operators}
        found: dict[str, Any] = {}
        for number, operator in self._operators.items():
            if number not in self.prepared.actions:
                self.prepared.actions[number] = self._action(number, operator.name)
            name, action = self.prepared.actions[number]
            found.setdefault(name, action)  # several operators may be one action; the first is taken
        return list(found.values())

    def _action(self, number: int, operator: str) -> tuple[str, Any]:
        name, *arguments = operator.split()
        made = Action(name=name, preconditions=[], postconditions=[])
        made.id = number
        made.mapping = {
            Placeholder(parameter.name.strip("?"), parameter.type_name): Variable(argument, parameter.type_name)
            for parameter, argument in zip(self._actions[name].parameters, arguments, strict=False)
        }
        made.command_template = self._logic.actions[name].template
        made.feedback_rule = self._logic.actions[name].feedback_rule
        return operator, made


class GameEngine(PddlEnv):
    """One game after the other, each from its problem and goal sentence, as alfworld's wrappers would play it."""

    def __init__(self) -> None:
        super().__init__(textworld.EnvInfos(won=True, admissible_commands=True))

    def play(self, problem: str, goal: str) -> GameState:
        """Begin a game; the state holds `feedback`, `admissible_commands` and `won`, as after each `step`."""
        self._logic = game_logic(goal)
        self._game_data = {"pddl_problem": problem}
        return self.reset()

    def reset(self) -> GameState:
        self._pddl_state = EpisodeState(self.downward_lib, self._game_data["pddl_problem"], self._logic)
        shared = self._pddl_state.prepared
        if not shared.entities:
            shared.entities = self._get_entity_infos()
            names = Demangler(game_infos=shared.entities)
            for entity in shared.entities.values():
                entity.name = names.demangle_alfred_name(entity.id)
        self._entity_infos = shared.entities
        self.prev_state, self.state = None, GameState()
        self._last_action, self._moves = None, 0
        self.state.feedback = self._logic.grammar.derive("#intro#", self._context({}))
        self.state.raw = self.state.feedback
        self._gather_infos()
        return self.state

    def _gather_infos(self) -> None:
        """What the original gathers and the game uses: neither copies of all facts nor a command derived twice."""
        state, commands = self.state, self._pddl_state.prepared.commands
        state["won"] = self._pddl_state.check_goal()
        state["lost"] = False
        state["_valid_actions"] = self._pddl_state.all_applicable_actions()
        for action in state["_valid_actions"]:
            if action.id not in commands:
                commands[action.id] = self._command(action)
        state["_valid_commands"] = [commands[action.id] for action in state["_valid_actions"]]
        state["admissible_commands"] = sorted(set(state["_valid_commands"]))

    def _command(self, action: Any) -> str:
        """What is typed for `action`. It does not depend on where one comes from, so every way to a place shares it."""
        known = self._pddl_state.prepared.typed
        key = (action.name, *(value.name for place, value in action.mapping.items() if place.name != "lstart"))
        if key not in known:
            named = copy.copy(action)
            named.command_template = self._logic.grammar.derive(action.command_template, self._context(action.mapping))
            names = {value.name: self._entity_infos[value.name].name for value in action.mapping.values()}
            known[key] = str(named.format_command(names))
        return known[key]

    def _context(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        return {
            "state": self._pddl_state,
            "facts": [],
            "variables": {place.name: self._entity_infos[value.name] for place, value in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entity_infos,
        }
