"""Games from files and generated games: nothing in a file is executed, and every game can be won."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.contracts.errors import DataError
from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.folders import (
    GAME,
    TRAJECTORY,
    games_digest,
    read_game,
    write_game,
)
from armature.components.environments.alfworld.games.game import (
    KINDS,
    LONGEST_NAME,
    SOURCES,
    FolderGames,
    Game,
    check_goal,
    check_problem,
)
from armature.components.environments.alfworld.games.generate import load_games
from armature.components.environments.alfworld.games.scenes import class_of, layout, position_of
from armature.components.environments.alfworld.text.host import EngineHost
from armature.components.machine.workers.channel import WorkerError
from tests.refusals import refused

from ..games_of import generated


@pytest.fixture(scope="module")
def games() -> list[Game]:
    return [game for source in SOURCES for game in load_games(generated(), source, count=6, seed=1)]


@pytest.fixture
def folder(games: list[Game], tmp_path: Path) -> Path:
    for game in games:
        write_game(game, tmp_path / "data")
    return tmp_path / "data"


def settings_of(folder: Path, **changes: Any) -> FolderGames:
    values = {"source": "folder", "path": str(folder), "digest": games_digest(folder), "kinds": list(KINDS)}
    return FolderGames.model_validate({**values, "replaced_grammars": [], **changes})


def path_of(folder: Path, game: Game) -> Path:
    return folder / game.source / game.name / GAME


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read(path: Path, folder: Path, *replaced: str) -> Game:
    return read_game(path, folder, "train", frozenset(replaced))


def test_games_round_trip_through_a_folder(folder: Path, games: list[Game]) -> None:
    for source in SOURCES:
        back = list(load_games(settings_of(folder), source, count=6, seed=0))
        assert sorted(back, key=lambda game: game.name) == sorted(
            (game for game in games if game.source == source), key=lambda game: game.name
        )
        assert list(load_games(settings_of(folder), source, count=3, seed=0)) == back[:3]
    orders = {tuple(g.name for g in load_games(settings_of(folder), "train", count=6, seed=s)) for s in range(5)}
    assert len(orders) > 1


def test_wrong_digest_error_shows_the_actual_digest(folder: Path) -> None:
    actual = games_digest(folder)
    for digest in ("", "0" * 64):
        with refused("games_digest_mismatch", actual):
            load_games(settings_of(folder, digest=digest), "train", count=1, seed=0)
    stale = settings_of(folder)
    trajectory = next(folder.rglob(TRAJECTORY))
    trajectory.write_text(trajectory.read_text() + " ")
    with refused("games_digest_mismatch", actual):
        load_games(stale, "train", count=1, seed=0)


def test_leaves_out_the_games_that_alfworld_leaves_out(folder: Path, games: list[Game]) -> None:
    first, second, third, fourth, fifth, _ = (path_of(folder, game) for game in games[:6])
    rewrite(first, solvable=False)
    rewrite(second, solvable=None)
    third.with_name(TRAJECTORY).unlink()
    for path, word in ((fourth, "Sliced"), (fifth, "movable")):
        shutil.move(path.parent.parent, path.parent.parent.with_name(f"{path.parent.parent.name}-{word}"))
    assert len(list(load_games(settings_of(folder), "train", count=1, seed=0))) == 1
    with refused("too_few_games", 2, "train", 1):
        load_games(settings_of(folder), "train", count=2, seed=0)
    with refused("too_few_games", "train", 0):
        load_games(settings_of(folder, kinds=[games[0].kind]), "train", count=1, seed=0)


def test_rejects_folder_without_games(tmp_path: Path) -> None:
    with refused("games_missing", tmp_path):
        games_digest(tmp_path)


def test_rejects_unknown_grammar_unless_listed_as_replaced(folder: Path, games: list[Game]) -> None:
    path, canary = path_of(folder, games[0]), folder / "canary"
    hostile = packaged.grammar().replace("You open the {r.name}.", f"{{open('{canary}', 'w')}}")
    rewrite(path, grammar=hostile.replace(packaged.GOAL, "put a book in desk"), walkthrough=["put book 1 in/on desk 1"])
    digest = hashlib.sha256(hostile.encode()).hexdigest()
    with refused("unknown_grammar", digest):
        read(path, folder)
    game = read(path, folder, digest)
    assert (game.goal, game.plan) == ("put a book in desk", ("move book 1 to desk 1",))
    assert not canary.exists()


GRAMMAR_GOALS = ("{open('canary', 'w')}", "#look.feedback#", "[a|b]", 'a", "condition": "b', "a\nb", "a\\u007b")


@pytest.mark.parametrize("goal", [*GRAMMAR_GOALS, "", "x" * 301, "é"])
def test_rejects_goal_with_grammar_syntax(folder: Path, games: list[Game], goal: str) -> None:
    path = path_of(folder, games[0])
    rewrite(path, grammar=packaged.grammar().replace(packaged.GOAL, goal))
    with refused("invalid_goal" if goal else "unknown_grammar", path):
        read(path, folder)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda text: 5, "int"),
        (lambda text: text + "(", ""),
        (lambda text: text[:-40], ""),
        (lambda text: text.replace("(:domain alfred)", "(:domain other)"), "'other'"),
        (lambda text: text.replace("(:init", "(:initially"), ":initially"),
        (lambda text: text.replace("agent1 - agent", "a" * (LONGEST_NAME + 1) + " - agent"), LONGEST_NAME + 1),
        (lambda text: text.replace("agent1 - agent", "age'nt - agent"), '"age\'nt"'),
        (lambda text: text.replace("agent1", "agént"), "ASCII"),
        (lambda text: text.replace("(:goal", "(:goal" + "(" * 40), 32),
        (lambda text: " " * 2**20 + text, 1048576),
        (lambda text: text.replace("(:init", "evil (:init"), "'evil'"),
        (lambda text: "evil " + text, "'evil'"),
    ],
)
def test_rejects_malformed_problems(games: list[Game], change: Any, value: object) -> None:
    with refused("invalid_problem", value, "here"):
        check_problem(change(games[0].problem), where="here")
    assert check_problem(games[0].problem, where="here") == games[0].problem


@settings(max_examples=300)
@given(st.text(alphabet="()abcdefin:- \n{}#[]|\"'\\", max_size=400) | st.text(max_size=60))
def test_random_text_is_never_a_valid_problem(text: str) -> None:
    with pytest.raises(DataError):
        check_problem(text, where="here")
    try:
        goal = check_goal(text, where="here")
    except DataError:
        return
    assert not set(goal) & set('{}#[]|"\\\n')


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost(1)
    yield host
    host.close()


def test_damaged_problem_fails_only_its_game(games: list[Game], host: EngineHost) -> None:
    """Names and facts that the domain does not have pass the checks of shape and reach the engine."""
    problem = games[0].problem
    lines = problem.split("\n")
    facts = [number for number, line in enumerate(lines) if line.startswith(" (")]

    failed = 0
    for number in facts[:: max(1, len(facts) // 40)]:
        damaged = "\n".join([*lines[:number], lines[number].replace(" ", " x", 2), *lines[number + 1 :]])
        try:
            host.play("damaged", check_problem(damaged, where=""), "put a book in desk").reset()
        except (WorkerError, DataError):
            failed += 1
    assert host.play("whole", problem, games[0].goal).reset().commands
    assert failed > 0


def test_games_depend_only_on_seed_and_index() -> None:
    few = list(load_games(generated(), "train", count=6, seed=5))
    assert few == list(islice(load_games(generated(), "train", count=12, seed=5), 6))
    assert [game.kind for game in few] == list(KINDS)
    others = list(load_games(generated(), "train", count=6, seed=6))
    assert all(one.problem != other.problem for one, other in zip(few, others, strict=True))


def test_unseen_scenes_are_in_no_other_split() -> None:
    scenes = {s: {game.scene for game in load_games(generated(), s, count=60, seed=0)} for s in SOURCES}
    first_six = {room + number for room in (0, 200, 300, 400) for number in range(1, 7)}
    assert scenes["valid_unseen"] <= first_six
    assert not (scenes["train"] | scenes["valid_seen"]) & first_six
    problems = [game.problem for s in SOURCES for game in load_games(generated(), s, count=60, seed=0)]
    assert len(set(problems)) == 180


def test_goal_is_not_met_at_the_start() -> None:
    """Check it by the facts in the problem, independently of the generator."""
    for game in load_games(generated(density=0.9), "train", count=48, seed=1):
        target = re.search(r"\(objectType \?\w+ (\w+)\)", game.problem)
        wanted = re.search(r"\(receptacleType \?r (\w+)\)", game.problem)
        assert target is not None
        facts = re.findall(r"\((\w+) (\S+) (\S+)\)", game.problem.partition("(:init")[2].partition("(:goal")[0])
        kinds = {name: kind for fact, name, kind in facts if fact in ("objectType", "receptacleType")}
        assert "(isClean " not in game.problem.partition("(:goal")[0]
        assert not re.search(r"\((isHot|isCool|isToggled|holds) ", game.problem.partition("(:goal")[0])
        if game.kind in ("pick_and_place_simple", "pick_two_obj_and_place"):
            assert wanted is not None
            inside = [name for fact, name, host in facts if fact == "inReceptacle" and kinds[host] == wanted[1]]
            assert target[1] not in {kinds[name] for name in inside}


def test_objects_lie_nearest_to_their_receptacle() -> None:
    """AI2-THOR has only positions, so it would otherwise show another game than the text game."""
    for game in load_games(generated(density=0.9), "train", count=12, seed=2):
        room = layout(game.scene)
        for pose in game.trajectory["scene"]["object_poses"]:
            name = pose["objectName"].replace("_", "|")
            assert tuple(pose["position"][axis] for axis in "xyz") == position_of(name)
            assert class_of(room.nearest(position_of(name))) in game.problem


def test_most_receptacles_limits_a_game() -> None:
    for game in load_games(generated(most_receptacles=4, most_instances=1), "train", count=5, seed=0):
        assert game.problem.partition("(:init")[0].count(" - receptacle\n") <= 4


def test_rejects_kind_without_a_room() -> None:
    with refused("room_missing", "pick_heat_then_place_in_recep", "Bedroom"):
        settings = generated(kinds=["pick_heat_then_place_in_recep"], rooms=["Bedroom"])
        list(load_games(settings, "train", count=1, seed=0))


def test_rejects_other_alfworld_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged._checked.cache_clear()
    monkeypatch.setitem(packaged.DIGESTS, "data/alfred.twl2", "0" * 64)
    with refused("alfworld_version_unsupported", "c5b22f"):
        packaged.grammar()
