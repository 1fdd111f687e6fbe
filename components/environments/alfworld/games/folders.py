"""Games in ALFWorld's own folder layout: <split>/<task>/<trial>/{game.tw-pddl, traj_data.json, initial_state.pddl}."""

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
LONGEST_PLAN, LONGEST_COMMAND = 500, 200

_SAID = re.compile(r"Your task is to: (.*?)\.\"")
_COMMAND = re.compile(r"[a-z0-9 /]+")
_OLD_PUT = re.compile(r"put (.+) in/on (.+)")  # until alfworld 0.4


def write_game(game: Game, folder: Path) -> None:
    """The game as alfworld's own environments read it, under `folder`/<split>/<its name>."""
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
    """`count` playable games of a split in an order drawn from `seed`.

    As alfworld does, games are left out that are not marked solvable, need sliced things or movable receptacles, or
    are of a task type that is not asked for.

    Raises:
        ConfigurationError: the folder's digest is another, or it has fewer playable games.
        DataError: a game's files are not what they should be.
    """
    root = project_path(settings.path)
    actual = games_digest(root)
    if settings.digest != actual:
        raise ConfigurationError(
            f"the games have the digest {actual}, the settings say {settings.digest!r}",
            code="games_digest_mismatch",
            where=str(root),
            remedy="give the right folder, or set digest to the actual value if these are the games that you mean",
        )
    paths = [path for path in _game_files(root, source) if _wanted(path, settings)]
    if len(paths) < count:
        raise ConfigurationError(
            f"{count} games are requested and {source} has {len(paths)} that can be played",
            code="too_few_games",
            where=str(root / source),
            remedy="ask for fewer tasks, or for more kinds",
        )
    order = Random(f"{source}/{seed}").sample(paths, len(paths))
    return (read_game(path, root, source, frozenset(settings.replaced_grammars)) for path in order[:count])


def games_digest(root: Path) -> str:
    """SHA-256 over names and contents of all splits' games and trajectories.

    Raises:
        ConfigurationError: there are none.
    """
    total, found = hashlib.sha256(), False
    for source in SOURCES:
        for game in _game_files(root, source):
            for path in (game, game.with_name(TRAJECTORY)):
                total.update(f"{path.relative_to(root).as_posix()}\0{file_sha256(path)}\n".encode())
                found = True
    if not found:
        raise ConfigurationError(
            "there are no games",
            code="games_missing",
            where=str(root),
            remedy=f"path is the folder that holds {', '.join(SOURCES)}, each with <task>/<trial>/{GAME}",
        )
    return total.hexdigest()


def read_game(path: Path, root: Path, source: Source, replaced: frozenset[str]) -> Game:
    """The game of which `path` is the game.tw-pddl.

    Its domain is not looked at and its grammar not used: of the file, the problem, the goal sentence and the
    walkthrough are taken, each after a check of its characters and shape.

    Raises:
        DataError: a check fails; or the grammar is another than the installed one and not in `replaced`.
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
    """The sentence that `grammar` has where the installed one has none."""
    before, _, after = packaged.grammar().partition(packaged.GOAL)
    if grammar.startswith(before) and grammar.endswith(after) and len(grammar) > len(before) + len(after):
        return grammar[len(before) : len(grammar) - len(after)]
    said = _SAID.search(grammar[: 2**20])
    template = grammar.replace(said[1], packaged.GOAL, 1) if said else grammar
    digest = hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest()
    if said is None or digest not in replaced:
        raise DataError(
            f"the game's grammar is not the installed one; without its goal it has the SHA-256 {digest}",
            code="unknown_grammar",
            where=str(path),
            remedy="list that value in replaced_grammars if such games are to be played with the installed grammar",
        )
    return said[1]


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
                f"the walkthrough holds {str(command)[:60]!r}, no command", code="invalid_walkthrough", where=str(path)
            )
    return tuple(_OLD_PUT.sub(r"move \1 to \2", command) for command in plan)


def _game_files(root: Path, source: Source) -> list[Path]:
    """All games of a split that have both files, in the order of their names."""
    return sorted(path for path in (root / source).glob(f"*/*/{GAME}") if path.with_name(TRAJECTORY).is_file())


def _wanted(path: Path, settings: FolderGames) -> bool:
    name = f"{path.parent.parent.name}/{path.parent.name}"
    if "movable" in name or "Sliced" in name:
        return False
    return _json(path.with_name(TRAJECTORY)).get("task_type") in settings.kinds and _json(path).get("solvable") is True


def _json(path: Path) -> dict[str, Any]:
    """
    Raises:
        DataError: the file is too large, or no JSON object.
    """
    try:
        document = json.loads(read_bytes(path, LARGEST_FILE))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", code="invalid_json", where=str(path)) from error
    if not isinstance(document, dict):
        raise DataError(f"a {type(document).__name__}, not a JSON object", code="invalid_json", where=str(path))
    return document
