"""Files of initial states: arrays are read, anything else is refused without executing it."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.robots.libero.tasks import MAX_STEPS, load_initial_states, read_states, suite_tasks
from tests.refusals import refused

from .simulated import needs_libero

pytestmark = needs_libero


def archive(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("archive/data.pkl", data)
    return out.getvalue()


def pickled(value: Any) -> bytes:
    return archive(pickle.dumps(value, protocol=2))


class Touch:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self._path),))


@pytest.mark.parametrize("suite", sorted(MAX_STEPS))
def test_initial_states_equal_torch_load(suite: str) -> None:
    task = suite_tasks(suite)[3]
    states = load_initial_states(task)
    assert states.shape[0] == task.initial_states == 50
    assert np.array_equal(states, torch.load(task.states_file, weights_only=False))


def test_all_state_files_have_a_known_digest() -> None:
    tasks = [task for suite in MAX_STEPS for task in suite_tasks(suite)]
    assert len(tasks) == 130
    for task in tasks:
        assert len(load_initial_states(task)) == task.initial_states
        assert task.bddl_file.is_file()


def test_rejects_unknown_state_file_unless_trusted() -> None:
    task = suite_tasks("libero_goal")[0]
    other = replace(task, digest="0" * 64)
    with refused("unknown_initial_states", task.digest):
        load_initial_states(other)
    assert len(load_initial_states(other, trusted=(task.digest,))) == 50


def test_rejects_malicious_pickle_without_executing_it(tmp_path: Path) -> None:
    with refused("invalid_initial_states", "mkdir"):
        read_states(pickled(Touch(tmp_path / "made")), "here")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK\x03\x04 cut short", id="cut"),
        pytest.param(archive(b"\x80\x02"), id="no pickle"),
        pytest.param(pickled([1.0, 2.0]), id="list"),
        pytest.param(pickled(np.zeros(5)), id="one dimension"),
        pytest.param(pickled(np.zeros((5, 3), np.float32)), id="float32"),
        pytest.param(pickled(np.array([[1.0, np.nan]])), id="nan"),
    ],
)
def test_rejects_state_files_without_one_array_of_numbers(data: bytes) -> None:
    with refused("invalid_initial_states", "here"):
        read_states(data, "here")


def test_unknown_suite_error_suggests_the_nearest_name() -> None:
    with refused("unknown_suite", "libero_spatial"):
        suite_tasks("libero_spacial")


def test_instruction_omits_the_scene_name() -> None:
    assert suite_tasks("libero_10")[2].language == "turn on the stove and put the moka pot on it"
