"""The arguments of each action of the stand-in player, equal to the arguments in the real releases.

Release 5.0 calls the method whose parameters have the names that were sent. It refuses an unknown name, except for
names that every action may have. Release 2.1 has one class with the arguments of all actions.
"""

from __future__ import annotations

from typing import Any

ALWAYS = {"action", "sequenceId", "agentId", "renderImage", "renderObjectImage", "renderClassImage"}
ALWAYS |= {"renderNormalsImage", "renderInstanceSegmentation"}

_OBJECT = ({"objectId"}, {"forceAction"})
ANY = None
"""Marks an action that accepts all arguments and ignores unknown ones."""

NEEDED_AND_OPTIONAL: dict[str, tuple[set[str], set[str]] | None] = {
    "Reset": ({"sceneName"}, set()),
    "Initialize": ANY,
    "GetScenesInBuild": (set(), set()),
    "ChangeResolution": ({"x", "y"}, set()),
    "ChangeQuality": ({"quality"}, set()),
    "Pass": (set(), set()),
    "SetObjectPoses": ({"objectPoses"}, {"placeStationary"}),
    "SetObjectToggles": ({"objectToggles"}, set()),
    "SetStateOfAllObjects": ({"StateChange"}, {"forceAction"}),
    "TeleportFull": ({"x", "y", "z", "rotation", "horizon", "standing"}, {"forceAction"}),
    "PickupObject": ({"objectId"}, {"forceAction", "manualInteract"}),
    "PutObject": ({"objectId"}, {"forceAction", "placeStationary"}),
    "OpenObject": ({"objectId"}, {"forceAction", "openness"}),
    "CloseObject": _OBJECT,
    "ToggleObjectOn": _OBJECT,
    "ToggleObjectOff": _OBJECT,
    "CleanObject": _OBJECT,
    "SliceObject": _OBJECT,
}
SINCE_2_1 = {"GetScenesInBuild", "ChangeQuality"}


def refusal(action: dict[str, Any], release: str) -> tuple[str, str]:
    """Return the error's code and message, or two empty strings if `action` is valid."""
    name = str(action.get("action"))
    if name not in NEEDED_AND_OPTIONAL or (release == "2.1" and name in SINCE_2_1):
        return "InvalidAction", f"there is no action {name}"
    signature = NEEDED_AND_OPTIONAL[name]
    if signature is ANY or release == "2.1":
        return "", ""
    needed, optional = signature
    if missing := needed - set(action):
        return "MissingArguments", f"{name} needs {', '.join(sorted(missing))}"
    if unknown := set(action) - needed - optional - ALWAYS:
        return "InvalidArgument", f"{name} has no {', '.join(sorted(unknown))}"
    return "", ""
