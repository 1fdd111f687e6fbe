"""Generate games from a seed: a room with objects, a goal that is possible there, and a plan that reaches it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from armature.components.artifacts.sources import versions
from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.folders import games_digest, read_games
from armature.components.environments.alfworld.games.game import FolderGames, Game, GeneratedGames, Kind, Source
from armature.components.environments.alfworld.games.scenes import (
    LAMP,
    TREATMENTS,
    GoalSpec,
    Scene,
    class_of,
    furnish,
    may_hold,
    plan,
    position_of,
    write_problem,
)
from armature.components.machine.project import project_path

ATTEMPTS = 400
"""Rooms to try for a game until its goal is possible in one of them."""

AGENT_HEIGHT = 0.9009992
"""Height of the agent in AI2-THOR in meters."""


def scenes_of(source: Source, kind: Kind, settings: GeneratedGames) -> list[int]:
    """Return the numbers of the scenes in which games of `kind` in the split `source` may take place.

    As in alfworld's data, scenes of valid_unseen are in no other split.
    """
    constants = packaged.constants()
    numbers = set(constants.TEST_SCENE_NUMBERS if source == "valid_unseen" else constants.TRAIN_SCENE_NUMBERS)
    rooms = [room for room in settings.rooms if room in constants.GOALS_VALID[kind]]
    return sorted(number for room in rooms for number in constants.SCENE_TYPE[room] if number in numbers)


def _generate(settings: GeneratedGames, source: Source, seed: int, index: int) -> Game:
    """Return a game that depends only on the arguments. The task types take turns over `index`.

    Raises:
        ConfigurationError: no room fits the task type.
    """
    kind = settings.kinds[index % len(settings.kinds)]
    numbers = scenes_of(source, kind, settings)
    for attempt in range(ATTEMPTS if numbers else 0):
        random = Random(f"{source}/{seed}/{index}/{attempt}")
        scene = furnish(random.choice(numbers), settings, random)
        goal = _possible_goal(kind, scene, random)
        if goal is None:
            continue
        visited = goal.visited(scene)
        # Two receptacles must not be reached from the same place: the game has no command to go where one stands.
        places = {scene.receptacles[name] for name in visited}
        if len(visited) > settings.most_receptacles or len(places) < len(visited):
            continue
        scene = scene.reduced(visited, settings.most_receptacles, random)
        return _game(goal, scene, source, random, f"T{index:05d}_{seed:010d}")
    raise ConfigurationError(
        f"no room fits a game of type {kind!r} in {', '.join(settings.rooms)}",
        code="room_missing",
        remedy="add rooms (heating and cooling need Kitchen, a lamp LivingRoom or Bedroom), or raise density, "
        "most_receptacles or, for two objects, most_instances",
    )


def _possible_goal(kind: Kind, scene: Scene, random: Random) -> GoalSpec | None:
    """Return a goal that is possible in `scene` and not met yet, drawn evenly over pairs of object type and place."""
    constants = packaged.constants()
    by_type: dict[str, list[str]] = {}
    for name in scene.objects:
        by_type.setdefault(class_of(name), []).append(name)
    lamps = by_type.pop(LAMP, [])
    if kind == "look_at_obj_in_light":
        if not lamps or not by_type:
            return None
        return GoalSpec(kind, (random.choice(by_type[random.choice(sorted(by_type))]),), None, lamps[0])
    wanted, property_, appliance = TREATMENTS.get(kind, (None, None, None))
    treated_in = scene.of_class(appliance) if appliance else [None]
    copies = 2 if kind == "pick_two_obj_and_place" else 1
    receptacles = {class_of(name) for name in scene.receptacles}
    options = [
        (target, receptacle)
        for target, names in by_type.items()
        for receptacle in receptacles
        if len(names) >= copies
        and (property_ is None or target in constants.VAL_ACTION_OBJECTS[property_])
        and may_hold(receptacle, target)
        and (wanted or all(class_of(scene.objects[name]) != receptacle for name in names))
    ]
    if not options or not treated_in:
        return None
    target, receptacle = random.choice(sorted(options))
    targets = tuple(random.sample(by_type[target], copies))
    return GoalSpec(kind, targets, random.choice(scene.of_class(receptacle)), random.choice(treated_in))


def _game(spec: GoalSpec, scene: Scene, source: Source, random: Random, trial: str) -> Game:
    target = class_of(spec.targets[0])
    toggled = LAMP if spec.destination is None else ""
    receptacle = class_of(spec.destination) if spec.destination else ""
    words: dict[str, Any] = packaged.goals()[spec.kind]
    goal = random.choice(words["templates"]).format(
        obj=target.lower(), recep=receptacle.lower(), toggle=toggled.lower(), mrecep=""
    )
    problem = write_problem(f"plan_{trial}", scene, words["pddl"].format(obj=target, recep=receptacle, toggle=toggled))
    return Game(
        name=f"{spec.kind}-{target}-None-{receptacle or toggled}-{scene.number}/trial_{trial}",
        kind=spec.kind,
        scene=scene.number,
        source=source,
        problem=problem,
        goal=goal,
        plan=plan(spec, scene, problem),
        trajectory=_trajectory(spec, scene, goal, trial, (target, receptacle, toggled), random),
    )


def _trajectory(
    spec: GoalSpec, scene: Scene, goal: str, trial: str, named: tuple[str, str, str], random: Random
) -> dict[str, Any]:
    target, receptacle, toggled = named
    x, z, quarters, horizon = scene.start
    return {
        "task_id": f"trial_{trial}",
        "task_type": spec.kind,
        "pddl_params": {
            "object_target": target,
            "parent_target": receptacle,
            "toggle_target": toggled,
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {
            "scene_num": scene.number,
            "floor_plan": f"FloorPlan{scene.number}",
            "random_seed": random.randrange(2**31),
            "dirty_and_empty": False,
            "object_toggles": [],
            "object_poses": [
                {
                    "objectName": name.replace("|", "_"),
                    "position": dict(zip("xyz", position_of(name), strict=True)),
                    "rotation": {"x": 0.0, "y": 0.0, "z": 0.0},
                }
                for name in sorted(scene.objects)
            ],
            "init_action": {
                "action": "TeleportFull",
                "x": x * 0.25,
                "y": AGENT_HEIGHT,
                "z": z * 0.25,
                "rotation": quarters * 90,
                "horizon": horizon,
                "rotateOnTeleport": True,
            },
        },
        "plan": {"high_pddl": [], "low_actions": []},
        "turk_annotations": {"anns": [{"task_desc": goal, "high_descs": []}]},
    }


# --- Games of either source ---


def load_games(games: GeneratedGames | FolderGames, source: Source, *, count: int, seed: int) -> Iterator[Game]:
    """Return `count` games of the split `source`. A larger count begins with the same games.

    Games of a folder are in an order drawn from `seed`. Generated games take turns through the kinds.

    Raises:
        ConfigurationError: there are fewer games, the folder has another digest, no room fits a task type, or alfworld
            is not installed.
        DataError: a game's file is not valid.
    """
    if isinstance(games, FolderGames):
        return read_games(games, source, count=count, seed=seed)
    packaged.folder()  # raises here, not at the first game, if alfworld is not installed
    return (_generate(games, source, seed, index) for index in range(count))


def games_sources(games: GeneratedGames | FolderGames) -> dict[str, str]:
    """Return versions and digests on which games depend besides their settings.

    A folder that does not exist on this machine counts with the digest from the settings.
    """
    sources = versions("alfworld", "textworld")
    if isinstance(games, FolderGames):
        folder = project_path(games.path)
        sources["games"] = games_digest(folder) if folder.is_dir() else games.digest
    return sources
