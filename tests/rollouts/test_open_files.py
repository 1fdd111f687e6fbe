"""Episodes take file handles: as many as may be in flight are allowed before they are taken."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from armature.components.contracts.machine import Machine
from armature.components.rollouts.open_files import allow_open_files

from .conftest import ScriptedPolicy
from .test_collect import Counting, play, says


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_episodes_at_once_than_files_may_be_open(few_files, store, events):
    policy = ScriptedPolicy(says("yes"), shuffle=True)
    machine = Machine.model_validate({"max_concurrent": 200, "environment_timeout": 30.0})
    outputs = play(Counting(turns=1), policy, store, events, tasks=1, group_size=200, machine=machine)
    assert len(outputs.trajectories) == 200


def test_a_hard_limit_that_is_too_low_is_said():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200));"
        "from armature.components.rollouts.open_files import allow_open_files; allow_open_files(201)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "200 files, and 201 are needed" in ended.stderr


def test_a_limit_that_is_high_enough_is_left_alone(few_files):
    allow_open_files(300)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
