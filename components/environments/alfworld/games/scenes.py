"""Rooms with objects, PDDL problems that describe them, and plans that solve the problems."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np

from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.game import GeneratedGames
from armature.components.environments.alfworld.packaged import names_of

# --- Rooms: receptacles of alfworld's scenes with objects placed in them ---

LAMP = "DeskLamp"
LAMP_HOSTS = frozenset({"Desk", "SideTable", "Dresser", "DiningTable", "Shelf", "CoffeeTable"})
LEFT_OUT = frozenset({"TeddyBear"})
"""Objects that alfworld's own experts cannot handle, because a comma is missing in its table of singular names."""

_SPREAD = 0.1
"""Largest distance in meters, along x and along z, between a receptacle's position and its objects."""

Place = tuple[int, int, int, int]
"""A pose of the agent: x and z in steps of 0.25 m, rotation in quarter turns, camera angle in degrees downwards."""


def class_of(identity: str) -> str:
    """Return the class of an object by its id: Fridge for Fridge|..., SinkBasin for Sink|...|SinkBasin."""
    parts = identity.split("|")
    return parts[4] if len(parts) == 5 else parts[0]


def position_of(identity: str) -> tuple[float, float, float]:
    """Return the position (x, y, z) in meters that an object's id contains."""
    x, y, z = (float(part) for part in identity.split("|")[1:4])
    return x, y, z


@dataclass(frozen=True)
class SceneLayout:
    """The fixed parts of a scene.

    `receptacles` maps the ids that AI2-THOR uses to the pose in front of each. `kinds` are the object types that the
    scene may hold, `start` the poses in which the agent may start.
    """

    receptacles: dict[str, Place]
    kinds: tuple[str, ...]
    start: tuple[Place, ...]

    def nearest(self, position: tuple[float, float, float]) -> str:
        """Return the id of the receptacle nearest to a position."""
        return min(self.receptacles, key=lambda name: math.dist(position_of(name), position))


@dataclass(frozen=True)
class Scene:
    """A room at the start of a game. `objects` maps each object's id in AI2-THOR to its receptacle's id."""

    number: int
    receptacles: dict[str, Place]
    objects: dict[str, str]
    start: Place

    def of_class(self, kind: str) -> list[str]:
        """Return the ids of all receptacles and objects of a class."""
        return [name for name in (*self.receptacles, *self.objects) if class_of(name) == kind]

    def reduced(self, keep: Iterable[str], most: int, random: Random) -> Scene:
        """Return the scene with at most `most` receptacles, all of `keep` among them, and the objects in them."""
        chosen = set(keep)
        others = [name for name in self.receptacles if name not in chosen]
        chosen |= set(random.sample(others, min(len(others), max(0, most - len(chosen)))))
        receptacles = {name: place for name, place in self.receptacles.items() if name in chosen}
        objects = {name: host for name, host in self.objects.items() if host in chosen}
        return Scene(self.number, receptacles, objects, self.start)


@cache
def layout(number: int) -> SceneLayout:
    """Return the layout of alfworld's scene FloorPlan`number`."""
    constants, folder = packaged.constants(), packaged.folder() / "gen/layouts"
    points = json.loads((folder / f"FloorPlan{number}-openable.json").read_text())
    receptacles = {
        name: (round(x / 0.25), round(z / 0.25), round(rotation % 360 / 90), round(horizon))
        for name, (x, z, rotation, horizon) in sorted(points.items())
        if class_of(name) in constants.RECEPTACLES
    }
    kinds = json.loads((folder / f"FloorPlan{number}-objects.json").read_text())
    reachable = np.load(folder / f"FloorPlan{number}-layout.npy", allow_pickle=False)
    free = {(round(x / 0.25), round(z / 0.25), 0, 30) for x, z in reachable.tolist()} - set(receptacles.values())
    return SceneLayout(receptacles, tuple(sorted(kinds)), tuple(sorted(free)))


def furnish(number: int, settings: GeneratedGames, random: Random) -> Scene:
    """Return a scene with objects in receptacles that may hold them. An object lies in the receptacle nearest to it."""
    constants, room = packaged.constants(), layout(number)
    movable = constants.OBJECTS_SET - (constants.RECEPTACLES - constants.MOVABLE_RECEPTACLES_SET) - LEFT_OUT
    objects: dict[str, str] = {}
    for kind in room.kinds:
        hosts = [name for name in room.receptacles if may_hold(class_of(name), kind)]
        if kind not in movable or not hosts:
            continue
        copies = 1 if kind == LAMP else random.randint(1, settings.most_instances)
        for _ in range(copies):
            if random.random() <= settings.density:
                host = random.choice(hosts)
                if identity := _placed(kind, host, room, objects, random):
                    objects[identity] = host
    return Scene(number, room.receptacles, objects, random.choice(room.start))


def may_hold(receptacle: str, kind: str) -> bool:
    """Check if a receptacle of class `receptacle` may hold an object of class `kind` at the start of a game."""
    if kind == LAMP:
        return receptacle in LAMP_HOSTS
    return kind in packaged.constants().VAL_RECEPTACLE_OBJECTS.get(receptacle, ())


def _placed(kind: str, host: str, room: SceneLayout, taken: dict[str, str], random: Random) -> str | None:
    x, y, z = position_of(host)
    for _ in range(20):
        near = (x + random.uniform(-_SPREAD, _SPREAD), y + 0.05, z + random.uniform(-_SPREAD, _SPREAD))
        identity = "{}|{:+06.2f}|{:+06.2f}|{:+06.2f}".format(kind, *near)
        if identity not in taken and room.nearest(position_of(identity)) == host:
            return identity
    return None


# --- Scenes as PDDL problems of ALFRED's domain ---

_PROPERTIES = {
    "Cleanable": "cleanable",
    "Heatable": "heatable",
    "Coolable": "coolable",
    "Toggleable": "toggleable",
    "Sliceable": "sliceable",
}
_MENTIONED_RECEPTACLES = {"SinkBasin", "Microwave", "Fridge"}
_MENTIONED_OBJECTS = {"Knife", "ButterKnife"}
"""Types that the domain's actions name. They have to be declared even if the scene has no such thing."""


def escaped(text: str) -> str:
    """Return a text with ids of AI2-THOR as PDDL names; # stands for a hyphen of PDDL, as in alfworld's goals."""
    for character, written in (("-", "minus"), ("|", "bar"), ("+", "plus"), (".", "dot"), (",", "comma")):
        text = text.replace(character, f"_{written}_")
    return text.replace("#", "-")


def write_problem(name: str, scene: Scene, goal: str) -> str:
    """Return a scene as the PDDL problem `name`: its things, their places and properties, and the PDDL `goal`."""
    constants = packaged.constants()
    receptacles, objects = scene.receptacles, scene.objects
    receptacle_types = sorted({class_of(name) for name in receptacles} | _MENTIONED_RECEPTACLES)
    object_types = sorted({class_of(name) for name in objects} | _MENTIONED_OBJECTS)
    locations = {place: "loc|{}|{}|{}|{}".format(*place) for place in sorted({*receptacles.values(), scene.start})}
    declared = [
        "agent1 # agent",
        *(f"{kind}Type # otype" for kind in object_types),
        *(f"{kind}Type # rtype" for kind in receptacle_types),
        *(f"{name} # object" for name in sorted(objects)),
        *(f"{name} # receptacle" for name in sorted(receptacles)),
        *(f"{location} # location" for location in locations.values()),
    ]
    facts = ["(= (total#cost) 0)"]
    for receptacle, place in sorted(receptacles.items()):
        facts += [
            f"(receptacleType {receptacle} {class_of(receptacle)}Type)",
            f"(receptacleAtLocation {receptacle} {locations[place]})",
        ]
        if class_of(receptacle) in constants.OPENABLE_CLASS_SET:
            facts.append(f"(openable {receptacle})")
    for name_, host in sorted(objects.items()):
        kind = class_of(name_)
        facts += [
            f"(objectType {name_} {kind}Type)",
            f"(inReceptacle {name_} {host})",
            f"(objectAtLocation {name_} {locations[receptacles[host]]})",
        ]
        if kind != LAMP:
            facts.append(f"(pickupable {name_})")
        if kind in constants.MOVABLE_RECEPTACLES_SET:
            facts.append(f"(isReceptacleObject {name_})")
        facts += [
            f"({fact} {name_})" for table, fact in _PROPERTIES.items() if kind in constants.VAL_ACTION_OBJECTS[table]
        ]
    for receptacle in receptacle_types:
        held = constants.VAL_RECEPTACLE_OBJECTS.get(receptacle, ())
        facts += [f"(canContain {receptacle}Type {kind}Type)" for kind in object_types if kind in held]
    facts.append(f"(atLocation agent1 {locations[scene.start]})")
    lines = "\n ".join
    # The goal's last parenthesis closes the problem.
    return escaped(
        f"(define (problem {name})\n(:domain alfred)\n(:objects\n {lines(declared)})\n(:init\n {lines(facts)})\n{goal}"
    )


# --- Plans: the commands that win a generated game (go, open, take, treat, go, open, put down) ---

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Coolable", "Fridge"),
}
"""For each task type with a treatment: its command, the property that an object needs, and the appliance."""


@dataclass(frozen=True)
class GoalSpec:
    """The goal of a game: the objects `targets`, their destination, and the appliance that treats or lights them.

    Things are named by their ids in AI2-THOR. `destination` is None for goals with a lamp.
    """

    kind: str
    targets: tuple[str, ...]
    destination: str | None
    appliance: str | None

    def visited(self, scene: Scene) -> set[str]:
        """Return the ids of the receptacles that a plan for this goal visits."""
        hosts = {scene.objects[name] for name in self.targets}
        if self.appliance:
            hosts.add(scene.objects.get(self.appliance, self.appliance))
        return hosts | ({self.destination} if self.destination else set())


def plan(goal: GoalSpec, scene: Scene, problem: str) -> tuple[str, ...]:
    """Return the commands that reach a goal, with the names that the text game of `problem` uses."""
    walk = _Walk(names_of(problem))
    for target in goal.targets:
        host = scene.objects[target]
        walk.go(host, look_inside=True)
        walk.say(f"take {walk.name(target)} from {walk.name(host)}")
        if goal.kind == "look_at_obj_in_light":
            assert goal.appliance is not None
            walk.go(scene.objects[goal.appliance])
            walk.say(f"use {walk.name(goal.appliance)}")
            continue
        if goal.appliance is not None:
            walk.go(goal.appliance)
            walk.say(f"{TREATMENTS[goal.kind][0]} {walk.name(target)} with {walk.name(goal.appliance)}")
        assert goal.destination is not None
        walk.go(goal.destination, look_inside=True)
        walk.say(f"move {walk.name(target)} to {walk.name(goal.destination)}")
    return tuple(walk.commands)


@dataclass
class _Walk:
    """A plan in the making: its commands, the receptacle where the agent stands, and the opened receptacles."""

    names: dict[str, str]
    commands: list[str] = field(default_factory=list)
    at: str = ""
    opened: set[str] = field(default_factory=set)

    def name(self, identity: str) -> str:
        return self.names[identity.lower()]

    def say(self, command: str) -> None:
        self.commands.append(command)

    def go(self, receptacle: str, look_inside: bool = False) -> None:
        if self.at != receptacle:
            self.say(f"go to {self.name(receptacle)}")
            self.at = receptacle
        openable = class_of(receptacle) in packaged.constants().OPENABLE_CLASS_SET
        if look_inside and openable and receptacle not in self.opened:
            self.say(f"open {self.name(receptacle)}")
            self.opened.add(receptacle)
