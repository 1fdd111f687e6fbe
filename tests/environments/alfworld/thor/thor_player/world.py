"""A scene of the stand-in player: receptacles, the poses from which they are seen, objects in them, and one agent."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

OPENABLE = {"Fridge", "Cabinet", "Microwave", "Drawer", "Safe"}
LAMPS = {"DeskLamp", "FloorLamp"}
SCENES = [base + number for base in (0, 200, 300, 400) for number in range(1, 31)]


class Refused(Exception):
    """An action failed; the message says why."""


def layout(scene: int) -> tuple[dict[str, list[float]], np.ndarray]:
    """Return the pose (x, z, rotation, horizon) that shows each receptacle, and free positions, shape (n, 2)."""
    package = find_spec("alfworld")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent / "gen/layouts"
    poses: dict[str, list[float]] = json.loads((folder / f"FloorPlan{scene}-openable.json").read_text())
    free = np.load(folder / f"FloorPlan{scene}-layout.npy", allow_pickle=False)
    return poses, np.concatenate([free, [pose[:2] for pose in poses.values()]])


class World:
    def __init__(self, release: str) -> None:
        self.release = release
        self.things: dict[str, dict[str, Any]] = {}
        self.poses: dict[str, list[float]] = {}
        self.reset("FloorPlan1_physics")

    def reset(self, scene: str) -> None:
        self.scene = scene
        self.things, self.held = {}, None
        self.position, self.rotation, self.horizon = {"x": 0.0, "y": 0.9, "z": 0.0}, 0.0, 30.0
        self.poses, self.free = layout(int("".join(filter(str.isdigit, scene))))
        for receptacle in list(self.poses):
            parts = receptacle.split("|")
            kind = parts[4] if len(parts) == 5 else parts[0]
            self._add(receptacle, kind, receptacle=True, openable=kind in OPENABLE, receptacleObjectIds=[])
            if kind == "Microwave":
                self.things[receptacle]["toggleable"] = True
            if kind in ("SinkBasin", "BathtubBasin"):
                faucet = "|".join(["Faucet", *parts[1:4]])
                self._add(faucet, "Faucet", toggleable=True)
                self.poses[faucet] = self.poses[receptacle]

    def _add(self, object_id: str, kind: str, **properties: Any) -> None:
        self.things[object_id] = {
            "objectId": object_id,
            "objectType": kind,
            "name": object_id.replace("|", "_"),
            "position": dict(zip("xyz", map(float, object_id.split("|")[1:4]), strict=True)),
            "rotation": {"x": 0.0, "y": 0.0, "z": 0.0},
            "distance": 1.0,
            "parentReceptacles": None,
            "receptacleObjectIds": None,
            **dict.fromkeys(("receptacle", "pickupable", "openable", "isOpen", "toggleable", "isToggled"), False),
            **dict.fromkeys(("sliceable", "dirtyable", "isDirty"), False),
        } | properties

    def in_sight(self) -> list[str]:
        """Return the ids of the things seen from the agent's pose; contents of closed receptacles are hidden."""
        seen: list[str] = []
        for object_id, (x, z, rotation, horizon) in self.poses.items():
            here = abs(x - self.position["x"]) < 0.01 and abs(z - self.position["z"]) < 0.01
            if here and (rotation - self.rotation) % 360 == 0 and horizon == self.horizon:
                thing = self.things[object_id]
                hidden = thing["openable"] and not thing["isOpen"]
                seen += [object_id, *([] if hidden else thing["receptacleObjectIds"] or [])]
        return seen

    def act(self, action: dict[str, Any]) -> Any:
        """Carry out an action and return its result.

        Raises:
            Refused: the action failed.
        """
        method = getattr(self, "do_" + action["action"], None)
        return method(action) if method else None

    def do_GetScenesInBuild(self, action: dict[str, Any]) -> list[str]:
        return [f"FloorPlan{scene}_physics" for scene in SCENES]

    def do_Reset(self, action: dict[str, Any]) -> None:
        self.reset(action["sceneName"])

    def do_Initialize(self, action: dict[str, Any]) -> dict[str, float]:
        return {"cameraNearPlane": 0.1, "cameraFarPlane": 20.0}

    def do_SetObjectPoses(self, action: dict[str, Any]) -> None:
        """Replace all movable objects: each new one goes into the receptacle nearest to its position."""
        self.things = {key: thing for key, thing in self.things.items() if thing["receptacle"] or key in self.poses}
        receptacles = [thing for thing in self.things.values() if thing["receptacle"]]
        for receptacle in receptacles:
            receptacle["receptacleObjectIds"] = []
        for pose in action["objectPoses"]:
            kind, at = pose["objectName"].split("_")[0], pose["position"]
            object_id = "|".join([kind, *(f"{at[axis]:+06.2f}" for axis in "xyz")])
            self._add(object_id, kind, pickupable=kind not in LAMPS, toggleable=kind in LAMPS)
            host = min(receptacles, key=lambda place: sum((place["position"][axis] - at[axis]) ** 2 for axis in "xyz"))
            host["receptacleObjectIds"].append(object_id)
            self.things[object_id]["parentReceptacles"] = [host["objectId"]]

    def do_TeleportFull(self, action: dict[str, Any]) -> None:
        if np.abs(self.free - (action["x"], action["z"])).max(axis=1).min() > 0.01:
            raise Refused("something is in the way")
        self.position = {axis: float(action[axis]) for axis in "xyz"}
        self.rotation, self.horizon = float(action["rotation"]["y"]), float(action["horizon"])

    def do_PickupObject(self, action: dict[str, Any]) -> None:
        thing = self._reachable(action["objectId"], "pickupable")
        if self.held is not None:
            raise Refused("the hand is full")
        for receptacle in thing["parentReceptacles"] or []:
            self.things[receptacle]["receptacleObjectIds"].remove(thing["objectId"])
        thing["parentReceptacles"], self.held = None, thing["objectId"]

    def do_PutObject(self, action: dict[str, Any]) -> None:
        target = action["receptacleObjectId"] if self.release == "2.1" else action["objectId"]
        receptacle = self._reachable(target, "receptacle")
        if self.held is None or (self.release == "2.1" and action["objectId"] != self.held):
            raise Refused("that is not in the hand")
        if receptacle["openable"] and not receptacle["isOpen"]:
            raise Refused("it is closed")
        receptacle["receptacleObjectIds"].append(self.held)
        self.things[self.held]["parentReceptacles"], self.held = [target], None

    def do_OpenObject(self, action: dict[str, Any]) -> None:
        self._reachable(action["objectId"], "openable")["isOpen"] = True

    def do_CloseObject(self, action: dict[str, Any]) -> None:
        self._reachable(action["objectId"], "openable")["isOpen"] = False

    def do_ToggleObjectOn(self, action: dict[str, Any]) -> None:
        self._reachable(action["objectId"], "toggleable")["isToggled"] = True

    def do_ToggleObjectOff(self, action: dict[str, Any]) -> None:
        self._reachable(action["objectId"], "toggleable")["isToggled"] = False

    def _reachable(self, object_id: str, must_be: str) -> dict[str, Any]:
        if object_id not in self.in_sight():
            raise Refused(f"{object_id} is not in sight")
        if not self.things[object_id][must_be]:
            raise Refused(f"{object_id} is not {must_be}")
        return self.things[object_id]
