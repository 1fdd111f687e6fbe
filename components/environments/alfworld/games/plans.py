"""The commands that win a generated game: go, open, take, treat, go, open, put down."""

from __future__ import annotations

from dataclasses import dataclass, field

from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.scenes import Scene, class_of
from armature.components.environments.alfworld.names import names_of

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
