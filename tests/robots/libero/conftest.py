"""A simulator that several test files share and reset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import suite_tasks

from .simulated import simulator


@pytest.fixture(scope="session")
def bowl() -> Iterator[LiberoSimulator]:
    made = LiberoSimulator(suite_tasks("libero_spatial")[0], simulator())
    yield made
    made.close()
