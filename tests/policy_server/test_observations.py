from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from components.contracts.errors import ConfigurationError, DataError
from components.policy_server.observations import ObservationFormat
from tests.policy_server.by_hand import encode
from tests.policy_server.conftest import FORM, FRONT, STATE, WRIST, message


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
    with pytest.raises(DataError, match=f"unknown field '{FRONT}'"):
        form.read(encode(fields))


def test_a_policy_without_names_of_cameras_takes_those_that_are_given() -> None:
    assert ObservationFormat.of((), 8, STATE, ("b", "a")).cameras == (("a", "a"), ("b", "b"))


@pytest.mark.parametrize(
    ("cameras", "names", "said"),
    [
        ((), (), "does not say which cameras"),
        ((FRONT, WRIST), ("one",), "sees 2 cameras .* 1 are named"),
        ((FRONT, WRIST), ("one", "one"), "the same name"),
        ((FRONT, WRIST), ("one", STATE), "the same name"),
        ((FRONT, WRIST), ("one", "prompt"), "the same name"),
    ],
)
def test_names_that_cannot_be_are_refused(cameras: tuple[str, ...], names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ObservationFormat.of(cameras, 8, STATE, names)


def test_an_answer_may_go_on_from_previous_actions() -> None:
    actions = np.linspace(-1, 1, 21).reshape(3, 7)
    previous = FORM.read(encode(message(0, previous_actions=actions, inference_delay=2))).observation.previous
    assert previous is not None and previous.delay == 2 and previous.actions.dtype == np.float32
    np.testing.assert_array_equal(previous.actions, actions.astype(np.float32))
    assert FORM.read(encode(message(0))).observation.previous is None
    assert FORM.describe()["previous_actions"]["shape"] == [None, 7]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_actions": np.zeros((2, 7))}, "inference_delay"),
        ({"inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.zeros((2, 6)), "inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.zeros((5, 7)), "inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.zeros(7), "inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.float32(1), "inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.array(1.0), "inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.zeros((2, 7), int), "inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.full((2, 7), np.nan), "inference_delay": 1}, "previous_actions"),
        ({"previous_actions": np.zeros((2, 7)), "inference_delay": 3}, "inference_delay"),
        ({"previous_actions": np.zeros((4, 7)), "inference_delay": 4}, "inference_delay"),  # nothing would be left
        ({"previous_actions": np.zeros((2, 7)), "inference_delay": -1}, "inference_delay"),
        ({"previous_actions": np.zeros((2, 7)), "inference_delay": 1.0}, "inference_delay"),
    ],
)
def test_previous_actions_that_cannot_be_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=f"field '{named}'"):
        FORM.read(encode(message(0, **fields)))
    with pytest.raises(DataError, match="unknown field"):
        replace(FORM, previous=None).read(encode(message(0, **fields)))


def test_a_refusal_says_the_field_what_is_expected_and_what_came() -> None:
    with pytest.raises(DataError) as refusal:
        FORM.read(encode(message(0, **{FRONT: np.zeros((3, 40, 50), np.float32)})))
    assert str(refusal.value) == (
        "an array of float32 with the shape [3, 40, 50] came\n"
        f"  where: field '{FRONT}'\n"
        "  what to do: send an array of uint8 with the shape [height, width, 3]: RGB, upright"
    )
    with pytest.raises(DataError, match=r"number \[2\] is nan(?s:.*)field 'observation.state'"):
        FORM.read(encode(message(0, **{STATE: np.array([0, 0, np.nan, 0, 0, 0, 0, 0], np.float32)})))
