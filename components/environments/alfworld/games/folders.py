"""Read and write games in ALFWorld's folder layout.

The layout is <split>/<task>/<trial>/ with the files game.tw-pddl, traj_data.json and initial_state.pddl.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from armature.components.artifacts.cache import file_sha256
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.game import (
    KINDS,
    SOURCES,
    FolderGames,
    Game,
    Source,
    check_goal,
    check_problem,
)
from armature.components.machine.project import project_path

GAME, TRAJECTORY, PROBLEM = "game.tw-pddl", "traj_data.json", "initial_state.pddl"
LARGEST_FILE = 16 * 2**20
"""Largest number of bytes in a file of a game."""
LONGEST_PLAN, LONGEST_COMMAND = 500, 200
"""Largest number of commands in a plan, and of characters in a command."""

_SENTENCE = re.compile(r"Your task is to: (.*?)\.\"")
_COMMAND = re.compile(r"[a-z0-9 /]+")
_OLD_PUT = re.compile(r"put (.+) in/on (.+)")  # until alfworld 0.4


def write_game(game: Game, folder: Path) -> None:
    """Write a game to `folder`/<split>/<name of the game>, in files that alfworld's own environments can read."""
    target = folder / game.source / game.name
    target.mkdir(parents=True)
    document = {
        "pddl_domain": packaged.domain(),
        "grammar": packaged.grammar().replace(packaged.GOAL, game.goal),
        "pddl_problem": game.problem,
        "solvable": True,
        "walkthrough": list(game.plan),
    }
    (target / GAME).write_text(json.dumps(document))
    (target / TRAJECTORY).write_text(json.dumps(dict(game.trajectory)))
    (target / PROBLEM).write_text(game.problem)


def read_games(settings: FolderGames, source: Source, *, count: int, seed: int) -> Iterator[Game]:
    """Return `count` playable games of a split in an order drawn from `seed`.

    Like alfworld, this leaves out games that are not marked solvable, that need sliced things or movable receptacles,
    or whose task type the settings do not list.

    Raises:
        ConfigurationError: the folder has another digest than the settings, or fewer playable games.
        DataError: a game's files are not valid.
    """
    root = project_path(settings.path)
    actual = games_digest(root)
    if settings.digest != actual:
        raise ConfigurationError(
            f"the games have the digest {actual}, the settings expect {settings.digest!r}",
            code="games_digest_mismatch",
            where=str(root),
            remedy="correct path, or set digest to the actual value if these are the intended games",
        )
    paths = [path for path in _game_files(root, source) if _wanted(path, settings)]
    if len(paths) < count:
        raise ConfigurationError(
            f"{count} games are requested and {source} has {len(paths)} that can be played",
            code="too_few_games",
            where=str(root / source),
            remedy="request fewer tasks, or more kinds",
        )
    order = Random(f"{source}/{seed}").sample(paths, len(paths))
    return (read_game(path, root, source, frozenset(settings.replaced_grammars)) for path in order[:count])


def games_digest(root: Path) -> str:
    """Return the SHA-256 over names and contents of the games and trajectories of all splits.

    Raises:
        ConfigurationError: the folder has no games.
    """
    games = [game for source in SOURCES for game in _game_files(root, source)]
    if not games:
        raise ConfigurationError(
            "there are no games",
            code="games_missing",
            where=str(root),
            remedy=f"set path to the folder that contains {', '.join(SOURCES)}, each with <task>/<trial>/{GAME}",
        )
    total = hashlib.sha256()
    for game in games:
        for path in (game, game.with_name(TRAJECTORY)):
            total.update(f"{path.relative_to(root).as_posix()}\0{file_sha256(path)}\n".encode())
    return total.hexdigest()


def read_game(path: Path, root: Path, source: Source, replaced: frozenset[str]) -> Game:
    """Read the game whose file game.tw-pddl is `path`.

    The file's problem, goal sentence and walkthrough are used, each after a check of its characters and shape. Its
    domain is ignored, and its grammar is never used, because a grammar is code.

    Args:
        path: the game's file.
        root: the folder of all splits.
        source: the split.
        replaced: SHA-256 of grammars that may differ from the installed one.

    Raises:
        DataError: a check fails, or the grammar is neither the installed one nor in `replaced`.
    """
    document, trajectory = _json(path), _json(path.with_name(TRAJECTORY))
    try:
        grammar, problem, plan = document["grammar"], document["pddl_problem"], document.get("walkthrough") or []
        kind, scene = trajectory["task_type"], trajectory["scene"]["scene_num"]
    except (KeyError, TypeError) as error:
        raise DataError(f"not a game of ALFWorld: {error!r}", code="not_a_game", where=str(path)) from error
    if type(scene) is not int or kind not in KINDS or not isinstance(grammar, str):
        raise DataError(
            "not a game of ALFWorld: its scene, task type or grammar is unknown", code="not_a_game", where=str(path)
        )
    return Game(
        name=path.parent.relative_to(root / source).as_posix(),
        kind=kind,
        scene=scene,
        source=source,
        problem=check_problem(problem, where=str(path)),
        goal=check_goal(_goal(grammar, replaced, path), where=str(path)),
        plan=_plan(plan, path),
        trajectory=trajectory,
    )


def _goal(grammar: str, replaced: frozenset[str], path: Path) -> str:
    """Return the goal sentence that `grammar` has in place of the installed grammar's placeholder."""
    before, _, after = packaged.grammar().partition(packaged.GOAL)
    if grammar.startswith(before) and grammar.endswith(after) and len(grammar) > len(before) + len(after):
        return grammar[len(before) : len(grammar) - len(after)]
    sentence = _SENTENCE.search(grammar[: 2**20])
    template = grammar.replace(sentence[1], packaged.GOAL, 1) if sentence else grammar
    digest = hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest()
    if sentence is None or digest not in replaced:
        raise DataError(
            f"the game's grammar is not the installed one; without its goal it has the SHA-256 {digest}",
            code="unknown_grammar",
            where=str(path),
            remedy="add that value to replaced_grammars to play such games with the installed grammar",
        )
    return sentence[1]


def _plan(plan: Any, path: Path) -> tuple[str, ...]:
    if not isinstance(plan, list) or len(plan) > LONGEST_PLAN:
        raise DataError(
            f"the walkthrough is not a list of at most {LONGEST_PLAN} commands",
            code="invalid_walkthrough",
            where=str(path),
        )
    for command in plan:
        if not isinstance(command, str) or len(command) > LONGEST_COMMAND or _COMMAND.fullmatch(command) is None:
            raise DataError(
                f"the walkthrough contains {str(command)[:60]!r}, which is not a command",
                code="invalid_walkthrough",
                where=str(path),
            )
    return tuple(_OLD_PUT.sub(r"move \1 to \2", command) for command in plan)


def _game_files(root: Path, source: Source) -> list[Path]:
    """Return the game files of a split that have a trajectory beside them, sorted by name."""
    return sorted(path for path in (root / source).glob(f"*/*/{GAME}") if path.with_name(TRAJECTORY).is_file())


def _wanted(path: Path, settings: FolderGames) -> bool:
    name = f"{path.parent.parent.name}/{path.parent.name}"
    if "movable" in name or "Sliced" in name:
        return False
    return _json(path.with_name(TRAJECTORY)).get("task_type") in settings.kinds and _json(path).get("solvable") is True


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        DataError: the file is too large or does not hold a JSON object.
    """
    try:
        document = json.loads(read_bytes(path, LARGEST_FILE))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", code="invalid_json", where=str(path)) from error
    if not isinstance(document, dict):
        raise DataError(f"a {type(document).__name__}, not a JSON object", code="invalid_json", where=str(path))
    return document
