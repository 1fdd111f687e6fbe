"""Translate alfworld's actions into the form that a release of AI2-THOR's player accepts.

alfworld is written for AI2-THOR 2.1.0, whose player ignores arguments that it does not know. From release 3 on, the
player looks for a method with exactly these arguments and otherwise answers InvalidArgument. Some arguments have other
names there, and the objectId of PutObject is the receptacle instead of the held object.
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
    """The treatment of an action's arguments: passed on, passed on under a new name, dropped, or added.

    Arguments are dropped if the release has nothing like them.
    """

    passed: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    added: Mapping[str, Any] = field(default_factory=dict)


def _passed(*names: str) -> ArgumentMapping:
    return ArgumentMapping(frozenset(names))


_OBJECT = _passed("objectId", "forceAction")
_ALIKE = {
    "GetScenesInBuild": ArgumentMapping(),
    "ChangeResolution": _passed("x", "y"),
    "ChangeQuality": _passed("quality"),
    "SetObjectToggles": _passed("objectToggles"),
    "SetStateOfAllObjects": _passed("StateChange", "forceAction"),
    "SetObjectPoses": _passed("objectPoses"),
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
        "OpenObject": _passed("objectId", "forceAction", "moveMagnitude"),
        "PutObject": _passed("objectId", "receptacleObjectId", "forceAction", "placeStationary"),
    },
    "5.0": _ALIKE
    | {
        "Initialize": ArgumentMapping(
            frozenset({"gridSize", "makeAgentsVisible"}),
            {"visibility_distance": "visibilityDistance", "renderObjectImage": "renderInstanceSegmentation"},
            # Without these two the player does not send the depth and class of each pixel, which nothing reads.
            frozenset({"cameraY", "renderImage", "renderDepthImage", "renderClassImage"}),
        ),
        "TeleportFull": ArgumentMapping(
            frozenset({"x", "y", "z", "rotation", "horizon"}),
            dropped=_RENDERED | {"rotateOnTeleport", "tempRenderChange"},
            added={"standing": True},
        ),
        "OpenObject": ArgumentMapping(frozenset({"objectId", "forceAction"}), dropped=frozenset({"moveMagnitude"})),
        "PutObject": ArgumentMapping(
            frozenset({"forceAction", "placeStationary"}),
            {"receptacleObjectId": "objectId"},
            frozenset({"objectId"}),
        ),
    },
}


def translate(action: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """Return an action of alfworld in the form for a player of `release`.

    Raises:
        PlayerError: the action or an argument does not exist, or a value cannot be written as JSON.

    Example:
        >>> translate({"action": "OpenObject", "objectId": "Fridge|1", "moveMagnitude": 1.0}, "5.0")
        {'action': 'OpenObject', 'objectId': 'Fridge|1'}
    """
    forms, name = FORMS[release], action.get("action")
    if not isinstance(name, str) or name not in forms:
        raise PlayerError(
            f"AI2-THOR {release} has no action {str(name)[:80]!r}",
            code="unknown_action",
            remedy=suggestion(str(name)[:80], forms),
        )
    form = forms[name]
    translated = {"action": name, **form.added}
    for argument, value in action.items():
        if argument == "action" or argument in form.dropped:
            continue
        if argument not in form.passed and argument not in form.renamed:
            raise PlayerError(
                f"{name} has no argument {str(argument)[:80]!r}",
                code="unknown_action_argument",
                remedy=suggestion(str(argument)[:80], form.passed | set(form.renamed) | form.dropped),
            )
        translated[form.renamed.get(argument, argument)] = value
    try:
        json.dumps(translated, allow_nan=False, default=lambda value: value.item())
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise PlayerError(f"{name} has a value that is not JSON: {error}", code="action_not_json") from error
    return translated
