"""Generated games: what a seed determines, which scenes a split has, and that they can be won."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.game import KINDS, SOURCES
from armature.components.environments.alfworld.games.load import load_games
from armature.components.environments.alfworld.games.scenes import class_of, layout, position_of
from tests.refusals import refused

from ..games_of import generated


def test_a_seed_gives_the_same_games_and_a_larger_count_begins_with_them() -> None:
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


def test_a_goal_is_not_met_as_a_game_begins() -> None:
    """Read from the problem's own facts, not from what the generator knew."""
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


def test_every_object_lies_nearest_to_the_receptacle_that_holds_it() -> None:
    """Else AI2-THOR, which knows positions only, would show another game than the text tells."""
    for game in load_games(generated(density=0.9), "train", count=12, seed=2):
        room = layout(game.scene)
        for pose in game.trajectory["scene"]["object_poses"]:
            name = pose["objectName"].replace("_", "|")
            assert tuple(pose["position"][axis] for axis in "xyz") == position_of(name)
            assert class_of(room.nearest(position_of(name))) in game.problem


def test_the_size_of_a_game_can_be_chosen() -> None:
    for game in load_games(generated(most_receptacles=4, most_instances=1), "train", count=5, seed=0):
        assert game.problem.partition("(:init")[0].count(" - receptacle\n") <= 4


def test_a_kind_without_a_room_is_refused() -> None:
    with refused("room_missing", "pick_heat_then_place_in_recep", "Bedroom"):
        settings = generated(kinds=["pick_heat_then_place_in_recep"], rooms=["Bedroom"])
        list(load_games(settings, "train", count=1, seed=0))


def test_another_grammar_than_the_known_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged._checked.cache_clear()
    monkeypatch.setitem(packaged.DIGESTS, "data/alfred.twl2", "0" * 64)
    with refused("alfworld_version_unsupported", "c5b22f"):
        packaged.grammar()
