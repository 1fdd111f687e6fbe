from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from armature.components.policy_server.observations import ObservationFormat
from tests.policy_server.by_hand import encode
from tests.policy_server.conftest import FORM, FRONT, STATE, WRIST, message
from tests.refusals import refused


def test_an_observation_is_what_was_sent() -> None:
    fields = message(3)
    request = FORM.read(encode(fields))
    assert request.seed is None and request.observation.task == fields["prompt"]
    assert list(request.observation.images) == [FRONT, WRIST]
    for name in (FRONT, WRIST):
        np.testing.assert_array_equal(request.observation.images[name], fields[name])
    np.testing.assert_array_equal(request.observation.state, fields[STATE])


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", ">f8"])
def test_a_state_of_other_floats_becomes_float32(dtype: str) -> None:
    state = np.linspace(-1, 1, 8).astype(dtype)
    read = FORM.read(encode(message(0, **{STATE: state}))).observation.state
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, state.astype(np.float32))


def test_a_seed_is_a_number_of_python_s_or_numpy_s() -> None:
    for seed in (0, 2**63 - 1, np.int64(5), np.uint8(7)):
        assert FORM.read(encode(message(0, seed=seed))).seed == int(seed)


def test_clients_may_have_names_of_their_own() -> None:
    form = ObservationFormat.of((WRIST, FRONT), 8, "observation/state", ("observation/wrist", "observation/image"))
    assert form.cameras == (("observation/wrist", WRIST), ("observation/image", FRONT))
    fields = message(0)
    sent = {"observation/wrist": fields[WRIST], "observation/image": fields[FRONT], "observation/state": fields[STATE]}
    read = form.read(encode({**sent, "prompt": "wait"})).observation
    np.testing.assert_array_equal(read.images[WRIST], fields[WRIST])
    assert list(form.describe()) == ["observation/wrist", "observation/image", "observation/state", "prompt", "seed"]
    with refused("unknown_field", repr(FRONT)):
        form.read(encode(fields))


def test_a_policy_without_names_of_cameras_takes_those_that_are_given() -> None:
    assert ObservationFormat.of((), 8, STATE, ("b", "a")).cameras == (("a", "a"), ("b", "b"))


@pytest.mark.parametrize(
    ("cameras", "names", "code", "shown"),
    [
        ((), (), "camera_names_mismatch", ()),
        ((FRONT, WRIST), ("one",), "camera_names_mismatch", (2, 1, FRONT, WRIST)),
        ((FRONT, WRIST), ("one", "one"), "field_name_repeated", ("one", "--camera")),
        ((FRONT, WRIST), ("one", STATE), "field_name_repeated", (STATE, "--state")),
        ((FRONT, WRIST), ("one", "prompt"), "field_name_repeated", ("prompt", "--camera")),
    ],
)
def test_names_that_cannot_be_are_refused(
    cameras: tuple[str, ...], names: tuple[str, ...], code: str, shown: tuple[object, ...]
) -> None:
    with refused(code, *shown):
        ObservationFormat.of(cameras, 8, STATE, names)


def test_an_answer_may_go_on_from_previous_actions() -> None:
    actions = np.linspace(-1, 1, 21).reshape(3, 7)
    previous = FORM.read(encode(message(0, previous_actions=actions, inference_delay=2))).observation.previous
    assert previous is not None and previous.delay == 2 and previous.actions.dtype == np.float32
    np.testing.assert_array_equal(previous.actions, actions.astype(np.float32))
    assert FORM.read(encode(message(0))).observation.previous is None
    assert FORM.describe()["previous_actions"]["shape"] == [None, 7]


@pytest.mark.parametrize(
    ("fields", "named", "code"),
    [
        ({"previous_actions": np.zeros((2, 7))}, "inference_delay", "field_missing"),
        ({"inference_delay": 1}, "previous_actions", "field_missing"),
        ({"previous_actions": np.zeros((2, 6)), "inference_delay": 1}, "previous_actions", "invalid_field"),
        ({"previous_actions": np.zeros((5, 7)), "inference_delay": 1}, "previous_actions", "invalid_field"),
        ({"previous_actions": np.zeros(7), "inference_delay": 1}, "previous_actions", "invalid_field"),
        ({"previous_actions": np.float32(1), "inference_delay": 1}, "previous_actions", "invalid_field"),
        ({"previous_actions": np.array(1.0), "inference_delay": 1}, "previous_actions", "invalid_field"),
        ({"previous_actions": np.zeros((2, 7), int), "inference_delay": 1}, "previous_actions", "invalid_field"),
        ({"previous_actions": np.full((2, 7), np.nan), "inference_delay": 1}, "previous_actions", "field_not_finite"),
        ({"previous_actions": np.zeros((2, 7)), "inference_delay": 3}, "inference_delay", "invalid_field"),
        # Nothing would be left of the answer.
        ({"previous_actions": np.zeros((4, 7)), "inference_delay": 4}, "inference_delay", "invalid_field"),
        ({"previous_actions": np.zeros((2, 7)), "inference_delay": -1}, "inference_delay", "invalid_field"),
        ({"previous_actions": np.zeros((2, 7)), "inference_delay": 1.0}, "inference_delay", "invalid_field"),
    ],
)
def test_previous_actions_that_cannot_be_are_refused(fields: dict[str, Any], named: str, code: str) -> None:
    with refused(code, repr(named)):
        FORM.read(encode(message(0, **fields)))
    with refused("unknown_field"):
        replace(FORM, previous=None).read(encode(message(0, **fields)))


def test_a_refusal_says_the_field_what_is_expected_and_what_came() -> None:
    with refused("invalid_field", f"field '{FRONT}'", "float32", [3, 40, 50], "uint8", "[height, width, 3]"):
        FORM.read(encode(message(0, **{FRONT: np.zeros((3, 40, 50), np.float32)})))
    with refused("field_not_finite", [2], "nan", f"field '{STATE}'"):
        FORM.read(encode(message(0, **{STATE: np.array([0, 0, np.nan, 0, 0, 0, 0, 0], np.float32)})))
