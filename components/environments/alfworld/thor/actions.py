"""alfworld's actions in the words of a player's release.

alfworld speaks to AI2-THOR 2.1.0, whose player reads the arguments it knows and overlooks the others. From
release 3 on the player looks for a method with exactly these arguments and answers InvalidArgument if there is
none; some arguments have other names, and PutObject names the receptacle where 2.1 named what is held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from armature.components.environments.alfworld.thor.metadata import PlayerError
from armature.components.machine.registry import suggestion

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
