"""alfworld's text engine with caches for results that it otherwise computes again. Import it in worker processes only.

The rules of games are unchanged: fast-downward's library decides transitions and goals, textworld's grammar makes the
texts. Only results that cannot change during a game are cached. Importing this module patches functions of these
packages for the whole process, because they call each other through their modules and offer no class to subclass.
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

# --- A shared library without debug information ---

_SEGMENT = struct.Struct("<IIQQQQQQ")


def loadable_part(library: bytes) -> bytes:
    """Return a 64-bit little-endian ELF file up to the end of its last segment.

    The loader needs only program headers and segments; sections such as debug information follow them. Any other file
    is returned unchanged.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        return library
    (offset,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    segments = (_SEGMENT.unpack_from(library, offset + index * size) for index in range(count))
    return library[: max(start + length for _, _, start, _, _, length, _, _ in segments)]


# --- Caches ---

CACHED_PROBLEMS = 32
"""Number of translated problems in the cache, a few MB each; all episodes of a group play the same problem."""

CACHED_TEXTS = 2048
"""Number of parsed grammar rules in the cache; the installed grammar has about 150."""

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
"""A planning task of one variable with nothing to do, as input for textworld's planner, which no game here uses."""


@dataclass
class CompiledProblem:
    """The data that all episodes of a PDDL problem share. Actions and commands are added when they first appear."""

    task: Any
    sas: str
    entities: dict[str, Any] = field(default_factory=dict)
    actions: dict[int, tuple[str, Any]] = field(default_factory=dict)
    commands: dict[int, str] = field(default_factory=dict)
    typed: dict[tuple[str, ...], str] = field(default_factory=dict)


@lru_cache(CACHED_PROBLEMS)
def compiled(problem: str) -> CompiledProblem:
    """Return the translation of a PDDL problem, from the cache if possible."""
    arguments = sys.argv
    try:
        return CompiledProblem(*_translate(packaged.domain(), problem))
    finally:
        sys.argv = arguments  # the translator overwrites it


def _pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> tuple[Any, str]:
    shared = compiled(problem)
    return shared.task, NO_PLAN if optimize else shared.sas


def _cached(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return `parse` with a cache. Each caller gets a copy, because callers modify the result."""

    @lru_cache(CACHED_TEXTS)
    def once(text: str, options: tuple[tuple[str, Any], ...]) -> Any:
        return parse(text, **dict(options))

    return lambda text, **options: copy.deepcopy(once(text, tuple(options.items())))


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """Copy a context shallowly.

    Textworld's function also copies the entities and variables, which nothing changes, and takes half of a step's time.
    """
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


_translate = fast_downward.pddl2sas
fast_downward.pddl2sas = _pddl2sas
textgen._parse_and_convert = _cached(textgen._parse_and_convert)
textgen.copy_context = _copy_context
textgen.Rule.parse_conjunctive_query = staticmethod(lru_cache(CACHED_TEXTS)(textgen.Rule.parse_conjunctive_query))


def load_slim_library(scratch: Path) -> None:
    """Make games load fast-downward's library without its 31 MB of debug information; each game loads a copy."""
    slim = scratch / "libdownward.so"
    slim.write_bytes(loadable_part(Path(fast_downward.interface.DOWNWARD_LIB_PATH).read_bytes()))
    fast_downward.interface.DOWNWARD_LIB_PATH = str(slim)


@cache
def _logic() -> Any:
    return logic.GameLogic(domain=packaged.domain(), grammar=packaged.grammar())


def game_logic(goal: str) -> Any:
    """Return the game's logic with the installed grammar and `goal` as plain text, of which nothing is executed."""
    shared = _logic()
    sentence = textgen.TerminalSymbol(f"Your task is to: {goal}.")
    own_logic = copy.copy(shared)
    own_logic.grammar = textgen.ContextSensitiveGrammar()
    own_logic.grammar._rules = {**shared.grammar._rules, "task": [textgen.ProductionRule("task", [sentence])]}
    return own_logic


# --- Playing ---


class EpisodeState(logic.PddlState):
    """The facts of one episode. Its action objects are shared by all episodes of the problem."""

    def __init__(self, library: Any, problem: str, game: Any) -> None:
        self.compiled = compiled(problem)
        super().__init__(library, problem, game)

    def all_applicable_actions(self) -> list[Any]:
        operators = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
        self.downward_lib.get_applicable_operators(operators)
        self._operators = {operator.id: operator for operator in operators}
        applicable: dict[str, Any] = {}
        for number, operator in self._operators.items():
            if number not in self.compiled.actions:
                self.compiled.actions[number] = self._action(number, operator.name)
            name, action = self.compiled.actions[number]
            applicable.setdefault(name, action)  # several operators may be the same action: take the first
        return list(applicable.values())

    def _action(self, number: int, operator: str) -> tuple[str, Any]:
        name, *arguments = operator.split()
        action = Action(name=name, preconditions=[], postconditions=[])
        action.id = number
        action.mapping = {
            Placeholder(parameter.name.strip("?"), parameter.type_name): Variable(argument, parameter.type_name)
            for parameter, argument in zip(self._actions[name].parameters, arguments, strict=False)
        }
        action.command_template = self._logic.actions[name].template
        action.feedback_rule = self._logic.actions[name].feedback_rule
        return operator, action


class GameEngine(PddlEnv):
    """Engine that plays text games one after another, each given by its PDDL problem and its goal sentence.

    Its states have the keys and texts of alfworld's wrappers.
    """

    def __init__(self) -> None:
        super().__init__(textworld.EnvInfos(won=True, admissible_commands=True))

    def play(self, problem: str, goal: str) -> GameState:
        """Start a game and return its state with `feedback`, `admissible_commands` and `won`, the keys that `step`
        returns too."""
        self._logic = game_logic(goal)
        self._game_data = {"pddl_problem": problem}
        return self.reset()

    def reset(self) -> GameState:
        self._pddl_state = EpisodeState(self.downward_lib, self._game_data["pddl_problem"], self._logic)
        shared = self._pddl_state.compiled
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
        """Fill in the state. Unlike textworld's method, this copies no facts and derives each command only once."""
        state, commands = self.state, self._pddl_state.compiled.commands
        state["won"] = self._pddl_state.check_goal()
        state["lost"] = False
        state["_valid_actions"] = self._pddl_state.all_applicable_actions()
        for action in state["_valid_actions"]:
            if action.id not in commands:
                commands[action.id] = self._command(action)
        state["_valid_commands"] = [commands[action.id] for action in state["_valid_actions"]]
        state["admissible_commands"] = sorted(set(state["_valid_commands"]))

    def _command(self, action: Any) -> str:
        """Return the command of `action`. The start location is not part of it, so all ways to a place share one."""
        cache = self._pddl_state.compiled.typed
        key = (action.name, *(value.name for place, value in action.mapping.items() if place.name != "lstart"))
        if key not in cache:
            named = copy.copy(action)
            named.command_template = self._logic.grammar.derive(action.command_template, self._context(action.mapping))
            names = {value.name: self._entity_infos[value.name].name for value in action.mapping.values()}
            cache[key] = str(named.format_command(names))
        return cache[key]

    def _context(self, mapping: Mapping[Any, Any]) -> dict[str, Any]:
        return {
            "state": self._pddl_state,
            "facts": [],
            "variables": {place.name: self._entity_infos[value.name] for place, value in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entity_infos,
        }
