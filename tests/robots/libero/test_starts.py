"""Episodes begin as their tasks say: objects that fall off their places are lowered, and other starts are refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.starts import object_poses
from armature.components.robots.libero.tasks import suite_tasks
from tests.refusals import refused

from .simulated import needs_libero, physics, simulator

pytestmark = needs_libero

BOWL, RAMEKIN = "akita_black_bowl_1", "glazed_rim_porcelain_ramekin_1"


@pytest.fixture(scope="module")
def stacked() -> Iterator[LiberoSimulator]:
    """The task whose bowl bounces off its ramekin when it falls."""
    made = LiberoSimulator(suite_tasks("libero_spatial")[5], simulator(num_steps_wait=10))
    yield made
    made.close()


def off_center(made: LiberoSimulator) -> float:
    """Return the horizontal distance of bowl and ramekin in meters."""
    poses = object_poses(made._environment)
    return float(np.linalg.norm((poses[BOWL].position - poses[RAMEKIN].position)[:2]))


def test_bowl_rests_on_its_ramekin(stacked: LiberoSimulator) -> None:
    _, broken = stacked._settle(0, 0)
    damping = stacked._environment.sim.model._model.dof_damping.copy()
    assert off_center(stacked) > 0.03  # LIBERO's tolerance of On
    assert [phrase.split(" does")[0] for phrase in broken] == [f"on {BOWL} {RAMEKIN}"]
    stacked.reset(0, 0)
    assert off_center(stacked) < 0.005
    first = physics(stacked)
    stacked.step(np.zeros(7))
    stacked.reset(0, 0)
    assert np.array_equal(physics(stacked), first)
    assert np.array_equal(stacked._environment.sim.model._model.dof_damping, damping)  # lowering has ended


def test_rejects_start_whose_goal_holds_unless_asked(stacked: LiberoSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stacked._environment.parsed_problem, "goal_state", [["on", BOWL, RAMEKIN]])
    with refused("broken_start", "libero_spatial, task 5, initial state 0"):
        stacked.reset(0, 0)
    monkeypatch.setattr(stacked, "_broken_starts", True)
    stacked.reset(0, 0)
    assert stacked.step(np.zeros(7))
