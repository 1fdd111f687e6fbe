"""Translation of alfworld's actions for each release of the player, and rewards of turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from armature.components.environments.alfworld.thor.actions import FORMS, RELEASES, Release, translate
from armature.components.environments.alfworld.thor.metadata import PlayerError
from armature.components.environments.alfworld.thor.tasks import PotentialReward, RewardTracker, TerminalReward, weights
from tests.refusals import refused

TELEPORT = {"x": 1.0, "y": 0.9, "z": -2.0, "rotation": 90, "horizon": 30}


RENDER = {"renderImage": True, "renderDepthImage": True, "renderClassImage": True, "renderObjectImage": True}
TOGGLES = [{"objectType": "DeskLamp", "isOn": False}]
SAME_IN_BOTH: list[dict[str, Any]] = [
    {"action": "Pass"},
    {"action": "PickupObject", "objectId": "Mug|1", "forceAction": True},
    {"action": "CloseObject", "objectId": "Fridge|1", "forceAction": True},
    {"action": "ToggleObjectOn", "objectId": "Faucet|1", "forceAction": True},
    {"action": "ToggleObjectOff", "objectId": "Faucet|1", "forceAction": True},
    {"action": "SliceObject", "objectId": "Apple|1"},
    {"action": "CleanObject", "objectId": "Apple|1"},
    {"action": "SetObjectToggles", "objectToggles": TOGGLES},
    {"action": "SetStateOfAllObjects", "StateChange": "CanBeDirty", "forceAction": True},
    {"action": "SetObjectPoses", "objectPoses": []},
    {"action": "ChangeResolution", "x": 400, "y": 300},
]


@pytest.mark.parametrize(
    ("alfworlds", "newer"),
    [
        (
            {"action": "TeleportFull", **TELEPORT, "rotateOnTeleport": False},
            {"action": "TeleportFull", **TELEPORT, "standing": True},
        ),
        (
            {"action": "PutObject", "objectId": "Mug|1", "receptacleObjectId": "Desk|2", "forceAction": True},
            {"action": "PutObject", "objectId": "Desk|2", "forceAction": True},
        ),
        (
            {"action": "OpenObject", "objectId": "Fridge|1", "moveMagnitude": 1.0},
            {"action": "OpenObject", "objectId": "Fridge|1"},
        ),
        (
            {"action": "Initialize", "gridSize": 0.25, "cameraY": 0.75, "visibility_distance": 1.5, **RENDER}
            | {"makeAgentsVisible": False},
            {"action": "Initialize", "gridSize": 0.25, "visibilityDistance": 1.5, "makeAgentsVisible": False}
            | {"renderInstanceSegmentation": True},
        ),
        *((action, action) for action in SAME_IN_BOTH),
    ],
    ids=lambda value: value["action"],
)
def test_translate_gives_each_release_its_arguments(alfworlds: dict[str, Any], newer: dict[str, Any]) -> None:
    """The older release gets alfworld's arguments unchanged."""
    before = json.dumps(alfworlds)
    assert translate(alfworlds, "2.1") == json.loads(before)
    assert translate(alfworlds, "5.0") == newer
    assert json.dumps(alfworlds) == before


def test_release_5_accepts_all_translated_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "thor_player"))
    from signatures import refusal

    for name, form in FORMS["5.0"].items():
        everything = dict.fromkeys(form.passed | set(form.renamed) | form.dropped, 1.0)
        action = translate({"action": name, **everything}, "5.0")
        assert refusal({**action, "sequenceId": 1}, "5.0") == ("", ""), name
    assert refusal({"action": "TeleportFull", **TELEPORT, "rotateOnTeleport": False, "standing": True}, "5.0")[0]
    sys.modules.pop("signatures")


def test_translate_accepts_numpy_numbers() -> None:
    assert translate({"action": "TeleportFull", **TELEPORT, "x": np.float32(1.5)}, "5.0")["x"] == 1.5


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("action", "code"),
    [
        ({}, "unknown_action"),
        ({"action": None}, "unknown_action"),
        ({"action": ["Pass"]}, "unknown_action"),
        ({"action": "Dance"}, "unknown_action"),
        ({"action": "pass"}, "unknown_action"),
        ({"action": "Pass", "objectId": "Mug|1"}, "unknown_action_argument"),
        ({"action": "TeleportFull", **TELEPORT, "x": float("nan")}, "action_not_json"),
        ({"action": "TeleportFull", **TELEPORT, "x": float("inf")}, "action_not_json"),
        ({"action": "PickupObject", "objectId": ...}, "action_not_json"),
        ({"action": "PickupObject", "objectId": {1, 2}}, "action_not_json"),
    ],
    ids=repr,
)
def test_rejects_invalid_actions(action: dict[str, Any], code: str, release: Release) -> None:
    with refused(code):
        translate(action, release)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
arguments = st.sampled_from(sorted({name for form in FORMS["2.1"].values() for name in form.passed})) | st.text()


@run(max_examples=400)
@given(
    st.sampled_from([*FORMS["5.0"], "", "Reset"]) | anything,
    st.dictionaries(arguments, anything),
    st.sampled_from(RELEASES),
)
def test_any_action_becomes_json_or_is_refused(name: Any, asked: dict[str, Any], release: Release) -> None:
    try:
        action = translate({**asked, "action": name}, release)
    except PlayerError:
        return
    form = FORMS[release][action["action"]]
    assert set(action) <= {"action"} | form.passed | set(form.renamed.values()) | set(form.added)
    assert "NaN" not in json.dumps(action) or "NaN" in repr(asked)


@given(st.lists(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 2 / 3, 1.0]), min_size=1, max_size=50))
def test_progress_rewards_sum_to_last_minus_first_share(shares: list[float]) -> None:
    settings = PotentialReward(name="potential", won_weight=10.0, progress_weight=1.0)
    earned = RewardTracker(settings, shares[0])
    turns = [earned.turn(share, share == 1.0) for share in shares[1:]]
    assert sum(turn["progress"] for turn in turns) == pytest.approx(shares[-1] - shares[0])


def test_holding_progress_earns_it_only_once() -> None:
    settings = PotentialReward(name="potential", won_weight=10.0, progress_weight=1.0)
    weight = weights(settings)

    def total(shares: list[float]) -> float:
        earned = RewardTracker(settings, 0.0)
        turns = [earned.turn(share, share == 1.0) for share in shares]
        return sum(weight[part] * value for turn in turns for part, value in turn.items())

    assert total([0.0, *[0.5] * 48, 0.5]) == pytest.approx(0.5)
    assert total([0.5] * 9 + [1.0]) == pytest.approx(11.0)
    assert total([0.5, 0.0] * 20 + [0.5]) == pytest.approx(0.5)


def test_terminal_reward_has_only_the_win() -> None:
    settings = TerminalReward(name="terminal", won_weight=10.0)
    earned = RewardTracker(settings, 0.0)
    assert weights(settings) == {"won": 10.0}
    assert [earned.turn(0.5, False), earned.turn(1.0, True)] == [{"won": 0.0}, {"won": 1.0}]
