"""alfworld's agent that carries out commands in AI2-THOR, adapted to the commands and names of the text game."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from alfworld.agents.controller.oracle import OracleAgent
from alfworld.env.thor_env import ThorEnv
from alfworld.gen import constants

from armature.components.environments.alfworld.packaged import kind_of
from armature.components.environments.alfworld.prompts import NOTHING

_MOVE = re.compile(r"move (\S+ \d+) to (\S+ \d+)")
_PUT = re.compile(r"put (\S+ \d+) (?:in/on|in|on) (\S+ \d+)")
_USES = {"microwave": "heat", "fridge": "cool", "sinkbasin": "clean", "bathtubbasin": "clean"}
_UNRELIABLE = ("go", "open", "close", "use", "slice")
"""Verbs after which alfworld reports success even if the player refused, because a failed event of ai2thor 5 is false,
which alfworld takes for None."""

_LAMPS = ("desklamp", "floorlamp")


class ThorAgent(OracleAgent):
    """An agent that carries out text commands in AI2-THOR.

    It teleports to receptacles, finds objects in the player's segmentation image, and acts by alfworld's recipes.
    `goal` is the task's sentence. `names` maps ids in lower case to names; a thing without a name gets the next free
    number of its kind. Names and observations depend only on the task.

    Raises:
        PlayerError: the player failed. Every method may raise it.
    """

    curr_recep: str
    curr_loc: dict[str, Any]
    visible_objects: list[str]

    def __init__(self, player: ThorEnv, trajectory: Mapping[str, Any], goal: str, names: Mapping[str, str]) -> None:
        self._goal, self._names = goal, names
        super().__init__(player, trajectory, traj_root="", load_receps=False)

    def act(self, command: str) -> tuple[str, bool]:
        """Carry out `command` if it is admissible, and return the feedback and True if it was."""
        put = _PUT.fullmatch(command)
        command = f"move {put[1]} to {put[2]}" if put else command
        if command not in self.get_admissible_commands():
            self.feedback = NOTHING
            return NOTHING, False
        before = self.curr_recep, self.curr_loc, self.visible_objects
        at = self.get_object(self.curr_recep, self.receptacles)
        stood_open = at is not None and at["closed"] is False
        self.step(command)
        if self.env.failure is not None:  # alfworld's step catches every exception
            raise self.env.failure
        move, verb = _MOVE.fullmatch(command), command.partition(" ")[0]
        if verb in _UNRELIABLE and not self.env.last_event:
            self.feedback = NOTHING
        if self.feedback == NOTHING:  # alfworld has recorded the attempted change as if it had happened: undo it
            self.curr_recep, self.curr_loc, self.visible_objects = before
            if verb in ("open", "close"):
                at["closed"] = not stood_open
        elif move:
            self.feedback = f"You move the {move[1]} to the {move[2]}."
        if verb in ("heat", "cool"):  # alfworld's recipe closes the door at the end; the text game does not move it
            reopen = {"action": "OpenObject", "objectId": at["object_id"], "forceAction": True}
            at["closed"] = not (stood_open and self.env.step(reopen))
        return self.feedback, True

    def parse_command(self, action_str: str) -> dict[str, Any]:
        if move := _MOVE.fullmatch(action_str):
            return {"action": self.Action.PUT, "obj": move[1], "rel": "to", "tar": move[2]}
        parsed: dict[str, Any] = super().parse_command(action_str)
        return parsed

    def get_admissible_commands(self) -> list[str]:
        """Return the admissible commands, sorted. alfworld's own method parses them out of the feedback's text."""
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
        """Look from each pose that alfworld lists for receptacles, and record the best view of each receptacle."""
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
                receptacle = self.receptacles.setdefault(
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
                if pixels > receptacle["num_pixels"]:
                    receptacle |= {"locs": pose, "num_pixels": pixels}

    def print_frame(self, recep: dict[str, Any], loc: dict[str, Any]) -> tuple[list[str], str]:
        """Return the names of the visible objects, and a sentence that lists them."""
        present = {thing["objectId"] for thing in self.env.last_event.metadata["objects"]}
        visible = []
        for object_id, pixels in self._seen():
            kind = object_id.split("|")[0]
            if kind not in self.OBJECTS or object_id not in present:
                continue
            name = self._name(object_id, self.objects)
            thing = self.objects.setdefault(
                object_id,
                {"object_id": object_id, "object_type": kind, "parent": recep["object_id"], "num_id": name}
                | {"loc": loc, "num_pixels": pixels},
            )
            if pixels > thing["num_pixels"]:
                thing |= {"loc": loc, "num_pixels": pixels}
            if thing["num_id"] not in self.inventory:
                visible.append(thing["num_id"])
        if not visible:
            return visible, "" if recep["closed"] else f"On the {recep['num_id']}, you see nothing."
        listed = self.fix_and_comma_in_the_end(" ".join(f"a {name}," for name in visible))
        return visible, f"On the {recep['num_id']}, you see {listed}"

    def print_intro(self) -> None:
        """Set the first observation, with the task's goal sentence; alfworld would draw one of several sentences."""
        listed = self.fix_and_comma_in_the_end(" ".join(f"a {place['num_id']}," for place in self.receptacles.values()))
        self.feedback = self.intro = (
            "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. "
            f"Looking quickly around you, you see {listed}\n\nYour task is to: {self._goal.rstrip('.')}."
        )

    def get_instance_seg(self) -> tuple[Counter[tuple[int, ...]], Mapping[tuple[int, ...], str]]:
        """Return the number of pixels of each color of the segmentation image, and each color's object id."""
        packed = self.env.segmentation().astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
        colors, counts = np.unique(packed, return_counts=True)
        unpacked = (((color >> 16) & 255, (color >> 8) & 255, color & 255) for color in colors.tolist())
        return Counter(dict(zip(unpacked, counts.tolist(), strict=True))), self.env.last_event.color_to_object_id

    def _seen(self) -> list[tuple[str, int]]:
        """Return the visible objects' ids with their numbers of pixels, the largest first."""
        counts, ids = self.get_instance_seg()
        seen = [(ids[color], pixels) for color, pixels in counts.items() if color in ids]
        return sorted(seen, key=lambda thing: (-thing[1], thing[0]))

    def _name(self, object_id: str, things: Mapping[str, Mapping[str, Any]]) -> str:
        """Return the name of an object: from the earlier `things`, from the task's names, or a free one."""
        if object_id in things:
            return str(things[object_id]["num_id"])
        if object_id.lower() in self._names:
            return self._names[object_id.lower()]
        kind = ("sliced-" if "Sliced" in object_id else "") + kind_of(object_id)
        taken = {*self._names.values(), *(thing["num_id"] for thing in things.values())}
        return next(name for number in range(1, len(taken) + 2) if (name := f"{kind} {number}") not in taken)
