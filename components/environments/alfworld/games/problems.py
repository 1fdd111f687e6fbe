"""PDDL problems of ALFRED's domain: how a scene is written down."""

from __future__ import annotations

from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.scenes import LAMP, Scene, class_of

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
