"""alfworld's agent of high-level commands in AI2-THOR, with the commands and the names of the text game."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from alfworld.agents.controller.oracle import OracleAgent
from alfworld.env.thor_env import ThorEnv
from alfworld.gen import constants

from armature.components.environments.alfworld.packaged import kind_of
from armature.components.environments.alfworld.prompts import NOTHING
from armature.components.environments.alfworld.thor.metadata import PlayerError
from armature.components.machine.registry import suggestion

# alfworld's actions in the words of a player's release.
#
# alfworld speaks to AI2-THOR 2.1.0, whose player reads the arguments it knows and overlooks the others. From release 3
# on the player looks for a method with exactly these arguments and answers InvalidArgument if there is none; some
# arguments have other names, and PutObject names the receptacle where 2.1 named what is held.

Release = Literal["2.1", "5.0"]
RELEASES: tuple[Release, ...] = get_args(Release)

_RENDERED = frozenset({"renderImage", "renderNormalsImage", "renderDepthImage"})
_RENDERED |= {"renderClassImage", "renderObjectImage"}


@dataclass(frozen=True)
class ArgumentMapping:
    """One action's arguments: kept, under another name, left out because the release has no such thing, added."""

    kept: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    added: Mapping[str, Any] = field(default_factory=dict)


def _kept(*names: str) -> ArgumentMapping:
    return ArgumentMapping(frozenset(names))


_OBJECT = _kept("objectId", "forceAction")
_ALIKE = {
    "GetScenesInBuild": ArgumentMapping(),
    "ChangeResolution": _kept("x", "y"),
    "ChangeQuality": _kept("quality"),
    "SetObjectToggles": _kept("objectToggles"),
    "SetStateOfAllObjects": _kept("StateChange", "forceAction"),
    "SetObjectPoses": _kept("objectPoses"),
    "PickupObject": _OBJECT,
    "CloseObject": _OBJECT,
    "ToggleObjectOn": _OBJECT,
    "ToggleObjectOff": _OBJECT,
    "SliceObject": _OBJECT,
    "CleanObject": _OBJECT,
    "Pass": ArgumentMapping(),
}

FORMS: dict[Release, dict[str, ArgumentMapping]] = {
    "2.1": _ALIKE
    | {
        "Initialize": ArgumentMapping(_RENDERED | {"gridSize", "cameraY", "visibility_distance", "makeAgentsVisible"}),
        "TeleportFull": ArgumentMapping(
            _RENDERED | {"x", "y", "z", "rotation", "horizon", "rotateOnTeleport", "tempRenderChange"}
        ),
        "OpenObject": _kept("objectId", "forceAction", "moveMagnitude"),
        "PutObject": _kept("objectId", "receptacleObjectId", "forceAction", "placeStationary"),
    },
    "5.0": _ALIKE
    | {
        "Initialize": ArgumentMapping(
            frozenset({"gridSize", "makeAgentsVisible"}),
            {"visibility_distance": "visibilityDistance", "renderObjectImage": "renderInstanceSegmentation"},
            # The depth and the classes of each pixel are sent along with every frame, and nobody looks at them.
            frozenset({"cameraY", "renderImage", "renderDepthImage", "renderClassImage"}),
        ),
        "TeleportFull": ArgumentMapping(
            frozenset({"x", "y", "z", "rotation", "horizon"}),
            left_out=_RENDERED | {"rotateOnTeleport", "tempRenderChange"},
            added={"standing": True},
        ),
        "OpenObject": ArgumentMapping(frozenset({"objectId", "forceAction"}), left_out=frozenset({"moveMagnitude"})),
        "PutObject": ArgumentMapping(
            frozenset({"forceAction", "placeStationary"}),
            {"receptacleObjectId": "objectId"},
            frozenset({"objectId"}),
        ),
    },
}


def translate(action: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """`action`, as alfworld says it, for a player of `release`.

    Raises:
        PlayerError: there is no such action, it has no such argument, or a value is not JSON.
    """
    forms, name = FORMS[release], action.get("action")
    if not isinstance(name, str) or name not in forms:
        raise PlayerError(
            f"no action {str(name)[:80]!r} in AI2-THOR {release}",
            code="unknown_action",
            remedy=suggestion(str(name)[:80], forms),
        )
    form = forms[name]
    said = {"action": name, **form.added}
    for argument, value in action.items():
        if argument == "action" or argument in form.left_out:
            continue
        if argument not in form.kept and argument not in form.renamed:
            known = form.kept | set(form.renamed) | form.left_out
            raise PlayerError(
                f"{name} has no argument {str(argument)[:80]!r}",
                code="unknown_action_argument",
                remedy=suggestion(str(argument)[:80], known),
            )
        said[form.renamed.get(argument, argument)] = value
    try:
        json.dumps(said, allow_nan=False, default=lambda value: value.item())
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise PlayerError(f"{name} has a value that is not JSON: {error}", code="action_not_json") from error
    return said


_MOVE = re.compile(r"move (\S+ \d+) to (\S+ \d+)")
_PUT = re.compile(r"put (\S+ \d+) (?:in/on|in|on) (\S+ \d+)")
_USES = {"microwave": "heat", "fridge": "cool", "sinkbasin": "clean", "bathtubbasin": "clean"}
_CLAIMED = ("go", "open", "close", "use", "slice")
"""What alfworld says has happened even where the player refused: to ai2thor 5 a failed event is false, like None."""

_LAMPS = ("desklamp", "floorlamp")


class ThorAgent(OracleAgent):
    """Teleports to receptacles, sees through the player's segmentation, and acts by alfworld's recipes.

    `goal` is the task's sentence, `names` what things are called by their ids in lower case; what has no name
    there gets the next free number of its kind. All of it is determined by the task.

    Raises:
        PlayerError: the player failed, here and in every method.
    """

    curr_recep: str
    curr_loc: dict[str, Any]
    visible_objects: list[str]

    def __init__(self, player: ThorEnv, trajectory: Mapping[str, Any], goal: str, names: Mapping[str, str]) -> None:
        self._goal, self._names = goal, names
        super().__init__(player, trajectory, traj_root="", load_receps=False)

    def act(self, command: str) -> tuple[str, bool]:
        """What `command` leads to, and whether it was one of the admissible commands; only those are carried out."""
        put = _PUT.fullmatch(command)
        command = f"move {put[1]} to {put[2]}" if put else command
        if command not in self.get_admissible_commands():
            self.feedback = NOTHING
            return NOTHING, False
        before = self.curr_recep, self.curr_loc, self.visible_objects
        at = self.get_object(self.curr_recep, self.receptacles)
        stood_open = at is not None and at["closed"] is False
        self.step(command)
        if self.env.failure is not None:  # alfworld's step catches everything
            raise self.env.failure
        move, verb = _MOVE.fullmatch(command), command.partition(" ")[0]
        if verb in _CLAIMED and not self.env.last_event:
            self.feedback = NOTHING
        if self.feedback == NOTHING:  # alfworld notes what it tried, not what came of it
            self.curr_recep, self.curr_loc, self.visible_objects = before
            if verb in ("open", "close"):
                at["closed"] = not stood_open
        elif move:
            self.feedback = f"You move the {move[1]} to the {move[2]}."
        if verb in ("heat", "cool"):  # alfworld's recipe ends with the door closed; the text game leaves it as it was
            reopen = {"action": "OpenObject", "objectId": at["object_id"], "forceAction": True}
            at["closed"] = not (stood_open and self.env.step(reopen))
        return self.feedback, True

    def parse_command(self, action_str: str) -> dict[str, Any]:
        if move := _MOVE.fullmatch(action_str):
            return {"action": self.Action.PUT, "obj": move[1], "rel": "to", "tar": move[2]}
        parsed: dict[str, Any] = super().parse_command(action_str)
        return parsed

    def get_admissible_commands(self) -> list[str]:
        """What can be done here, sorted; alfworld's own list is cut out of the feedback's text."""
        here, held = self.curr_recep, self.inventory[0] if self.inventory else None
        commands = {"inventory", "look", *(f"go to {place['num_id']}" for place in self.receptacles.values())}
        commands.discard(f"go to {here}")
        at = self.get_object(here, self.receptacles)
        closed = at is not None and bool(at["closed"])
        seen = [] if closed else [name for name in self.visible_objects if name not in self.inventory]
        if at is not None:
            commands.add(f"examine {here}")
            if at["closed"] is not None:
                commands.add(f"{'open' if closed else 'close'} {here}")
            commands |= {f"use {name}" for name in seen if name.startswith(_LAMPS)}
            if held is None:
                commands |= {f"take {name} from {here}" for name in seen if not name.startswith(_LAMPS)}
            else:
                commands |= set() if closed else {f"move {held} to {here}"}
                use = _USES.get(here.partition(" ")[0])
                commands |= {f"{use} {held} with {here}"} if use else set()
                commands |= {f"slice {name} with {held}" for name in seen} if "knife" in held else set()
        if held is not None:
            commands.add(f"examine {held}")
        return sorted(commands)

    def explore_scene(self) -> None:
        """Look from each of the poses that alfworld knows to show a receptacle, and keep the best view of each."""
        height = self.env.last_event.metadata["agent"]["position"]["y"]
        for x, z, rotation, horizon in self.openable_points.values():
            pose = {"action": "TeleportFull", "x": x, "y": height, "z": z}
            pose |= {"rotateOnTeleport": False, "rotation": rotation, "horizon": horizon}
            if not self.env.step(pose):
                continue
            for object_id, pixels in self._seen():
                kind = object_id.split("|")[0] + ("Basin" if "Basin" in object_id else "")
                if kind not in self.STATIC_RECEPTACLES:
                    continue
                known = self.receptacles.setdefault(
                    object_id,
                    {
                        "object_id": object_id,
                        "object_type": kind,
                        "locs": pose,
                        "num_pixels": pixels,
                        "num_id": self._name(object_id, self.receptacles),
                        "closed": True if kind in constants.OPENABLE_CLASS_LIST else None,
                    },
                )
                if pixels > known["num_pixels"]:
                    known |= {"locs": pose, "num_pixels": pixels}

    def print_frame(self, recep: dict[str, Any], loc: dict[str, Any]) -> tuple[list[str], str]:
        """The objects in sight, and the sentence that lists them."""
        present = {thing["objectId"] for thing in self.env.last_event.metadata["objects"]}
        visible = []
        for object_id, pixels in self._seen():
            kind = object_id.split("|")[0]
            if kind not in self.OBJECTS or object_id not in present:
                continue
            name = self._name(object_id, self.objects)
            known = self.objects.setdefault(
                object_id,
                {"object_id": object_id, "object_type": kind, "parent": recep["object_id"], "num_id": name}
                | {"loc": loc, "num_pixels": pixels},
            )
            if pixels > known["num_pixels"]:
                known |= {"loc": loc, "num_pixels": pixels}
            if known["num_id"] not in self.inventory:
                visible.append(known["num_id"])
        if not visible:
            return visible, "" if recep["closed"] else f"On the {recep['num_id']}, you see nothing."
        listed = self.fix_and_comma_in_the_end(" ".join(f"a {name}," for name in visible))
        return visible, f"On the {recep['num_id']}, you see {listed}"

    def print_intro(self) -> None:
        """alfworld draws one of several sentences for the goal; ours is the task's."""
        listed = self.fix_and_comma_in_the_end(" ".join(f"a {place['num_id']}," for place in self.receptacles.values()))
        self.feedback = self.intro = (
            "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. "
            f"Looking quickly around you, you see {listed}\n\nYour task is to: {self._goal.rstrip('.')}."
        )

    def get_instance_seg(self) -> tuple[Counter[tuple[int, ...]], Mapping[tuple[int, ...], str]]:
        """Pixels of each color of the segmentation, and whose color it is."""
        packed = self.env.segmentation().astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
        colors, counts = np.unique(packed, return_counts=True)
        unpacked = (((color >> 16) & 255, (color >> 8) & 255, color & 255) for color in colors.tolist())
        return Counter(dict(zip(unpacked, counts.tolist(), strict=True))), self.env.last_event.color_to_object_id

    def _seen(self) -> list[tuple[str, int]]:
        """The ids in sight with their pixels, the largest first."""
        counts, ids = self.get_instance_seg()
        seen = [(ids[color], pixels) for color, pixels in counts.items() if color in ids]
        return sorted(seen, key=lambda thing: (-thing[1], thing[0]))

    def _name(self, object_id: str, known: Mapping[str, Mapping[str, Any]]) -> str:
        if object_id in known:
            return str(known[object_id]["num_id"])
        if object_id.lower() in self._names:
            return self._names[object_id.lower()]
        kind = ("sliced-" if "Sliced" in object_id else "") + kind_of(object_id)
        taken = {*self._names.values(), *(thing["num_id"] for thing in known.values())}
        return next(name for number in range(1, len(taken) + 2) if (name := f"{kind} {number}") not in taken)
