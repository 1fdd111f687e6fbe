"""Rooms, the problems that are set in them, and the plans that solve these."""

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

# Rooms: the receptacles of alfworld's scenes, and objects spread over them.

LAMP = "DeskLamp"
LAMP_HOSTS = frozenset({"Desk", "SideTable", "Dresser", "DiningTable", "Shelf", "CoffeeTable"})
LEFT_OUT = frozenset({"TeddyBear"})
"""Objects that alfworld's own experts fail on: its table of singular names lacks a comma there."""

_SPREAD = 0.1
"""Meters around a receptacle's position within which its objects lie, along x and z."""

Place = tuple[int, int, int, int]
"""Where one stands: x and z in steps of 0.25 m, quarter turns, degrees that one looks down."""


def class_of(identity: str) -> str:
    """Fridge of Fridge|..., and SinkBasin of Sink|...|SinkBasin."""
    parts = identity.split("|")
    return parts[4] if len(parts) == 5 else parts[0]


def position_of(identity: str) -> tuple[float, float, float]:
    x, y, z = (float(part) for part in identity.split("|")[1:4])
    return x, y, z


@dataclass(frozen=True)
class SceneLayout:
    """What does not change in a scene. `receptacles` are named as in AI2-THOR, with where one stands before them."""

    receptacles: dict[str, Place]
    kinds: tuple[str, ...]
    start: tuple[Place, ...]

    def nearest(self, position: tuple[float, float, float]) -> str:
        return min(self.receptacles, key=lambda name: math.dist(position_of(name), position))


@dataclass(frozen=True)
class Scene:
    """A room as a game begins: `objects` are named as in AI2-THOR, with the receptacle that each is in."""

    number: int
    receptacles: dict[str, Place]
    objects: dict[str, str]
    start: Place

    def of_class(self, kind: str) -> list[str]:
        return [name for name in (*self.receptacles, *self.objects) if class_of(name) == kind]

    def reduced(self, keep: Iterable[str], most: int, random: Random) -> Scene:
        """The scene with `most` receptacles, those to `keep` among them, and what is in them."""
        kept = set(keep)
        others = [name for name in self.receptacles if name not in kept]
        kept |= set(random.sample(others, min(len(others), max(0, most - len(kept)))))
        receptacles = {name: place for name, place in self.receptacles.items() if name in kept}
        objects = {name: host for name, host in self.objects.items() if host in kept}
        return Scene(self.number, receptacles, objects, self.start)


@cache
def layout(number: int) -> SceneLayout:
    """The layout of FloorPlan`number` that comes with alfworld."""
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
    """The scene with objects where they may be; the nearest receptacle of an object is the one that it is in."""
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
    """Whether a receptacle of one class may hold an object of another as a game begins."""
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


# PDDL problems of ALFRED's domain: how a scene is written down.

_PROPERTIES = {
    "Cleanable": "cleanable",
    "Heatable": "heatable",
    "Coolable": "coolable",
    "Toggleable": "toggleable",
    "Sliceable": "sliceable",
}
_MENTIONED_RECEPTACLES = {"SinkBasin", "Microwave", "Fridge"}
_MENTIONED_OBJECTS = {"Knife", "ButterKnife"}
"""Types that the domain's actions name, and that must exist even where no such thing does."""


def escaped(text: str) -> str:
    """An id of AI2-THOR as a PDDL name. alfworld's goals have # for the - of PDDL itself."""
    for character, written in (("-", "minus"), ("|", "bar"), ("+", "plus"), (".", "dot"), (",", "comma")):
        text = text.replace(character, f"_{written}_")
    return text.replace("#", "-")


def write_problem(name: str, scene: Scene, goal: str) -> str:
    """The problem `name`: what is in `scene`, where it is, what can be done with it, and the PDDL `goal`."""
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
        able = (said for table, said in _PROPERTIES.items() if kind in constants.VAL_ACTION_OBJECTS[table])
        facts += [f"({said} {name_})" for said in able]
    for receptacle in receptacle_types:
        held = constants.VAL_RECEPTACLE_OBJECTS.get(receptacle, ())
        facts += [f"(canContain {receptacle}Type {kind}Type)" for kind in object_types if kind in held]
    facts.append(f"(atLocation agent1 {locations[scene.start]})")
    lines = "\n ".join
    # The goal's last parenthesis closes the problem.
    return escaped(
        f"(define (problem {name})\n(:domain alfred)\n(:objects\n {lines(declared)})\n(:init\n {lines(facts)})\n{goal}"
    )


# The commands that win a generated game: go, open, take, treat, go, open, put down.

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Coolable", "Fridge"),
}
"""By task type: the command, the property that an object needs for it, and the appliance."""


@dataclass(frozen=True)
class GoalSpec:
    """What is to be done with which things, all named as in AI2-THOR. `appliance` treats or, a lamp, shines."""

    kind: str
    targets: tuple[str, ...]
    destination: str | None
    appliance: str | None

    def visited(self, scene: Scene) -> set[str]:
        """The receptacles that the plan goes to."""
        hosts = {scene.objects[name] for name in self.targets}
        if self.appliance:
            hosts.add(scene.objects.get(self.appliance, self.appliance))
        return hosts | ({self.destination} if self.destination else set())


def plan(errand: GoalSpec, scene: Scene, problem: str) -> tuple[str, ...]:
    """The commands, in the words of the text game of `problem`."""
    walk = _Walk({name.lower(): said for name, said in names_of(problem).items()})
    for target in errand.targets:
        host = scene.objects[target]
        walk.go(host, look_inside=True)
        walk.say(f"take {walk.name(target)} from {walk.name(host)}")
        if errand.kind == "look_at_obj_in_light":
            assert errand.appliance is not None
            walk.go(scene.objects[errand.appliance])
            walk.say(f"use {walk.name(errand.appliance)}")
            continue
        if errand.appliance is not None:
            walk.go(errand.appliance)
            walk.say(f"{TREATMENTS[errand.kind][0]} {walk.name(target)} with {walk.name(errand.appliance)}")
        assert errand.destination is not None
        walk.go(errand.destination, look_inside=True)
        walk.say(f"move {walk.name(target)} to {walk.name(errand.destination)}")
    return tuple(walk.commands)


@dataclass
class _Walk:
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
