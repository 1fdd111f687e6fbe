"""Rooms: the receptacles of alfworld's scenes, and objects spread over them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np

from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.game import GeneratedGames

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
