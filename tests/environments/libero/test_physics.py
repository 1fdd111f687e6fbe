"""Quicker steps of the physics, control and sensors against robosuite's own stepping."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.environments.libero.control import restore
from armature.components.environments.libero.physics import one_pass
from armature.components.environments.libero.simulator import LiberoSimulator
from armature.components.environments.libero.tasks import suite_tasks

from .mesh_physics import TASKS
from .simulated import needs_libero, simulator

pytestmark = needs_libero

ALL = int(mujoco.mjtState.mjSTATE_INTEGRATION)


def trajectory(made: LiberoSimulator, plain: bool) -> list[list[NDArray[np.float64]]]:
    """After each action: what the integration depends on, where everything is and touches, and what robosuite saw."""
    made.reset(1, 5)
    if plain:
        restore(made._environment)
    sim, seen = made._environment.sim, []
    model, data = sim.model._model, sim.data._data
    rng = np.random.default_rng(0)
    for number in range(12):
        action = np.append(rng.uniform(-1, 1, 6), 1 if number % 2 else -1)
        action[2] = -1.0  # down, onto what is there
        if plain:
            made.observed, *_ = made._environment.step(action)
        else:
            made.step(action)
        state = np.empty(mujoco.mj_stateSize(model, ALL))
        mujoco.mj_getState(model, data, state, ALL)
        derived = [
            data.ctrl,
            data.xpos,
            data.geom_xpos,
            data.qacc,
            data.qfrc_constraint,
            data.sensordata,
            data.contact.dist,
        ]
        sensed = [np.ravel(made.observed[name]) for name in sorted(made.observed)]
        seen.append([state, *(np.array(each) for each in derived), *sensed])
    return seen


@pytest.mark.parametrize(("suite", "index"), TASKS)
def test_quicker_steps_have_the_bits_of_robosuite(suite: str, index: int) -> None:
    made = LiberoSimulator(suite_tasks(suite)[index], simulator())
    for ours, theirs in zip(trajectory(made, plain=False), trajectory(made, plain=True), strict=True):
        assert len(ours) == len(theirs)
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    made.close()


def test_what_was_put_in_front_of_robosuite_is_gone_afterwards() -> None:
    made = LiberoSimulator(suite_tasks("libero_spatial")[0], simulator())
    made.reset(0, 0)
    sim = made._environment.sim
    with pytest.raises(ZeroDivisionError), one_pass(sim):
        raise ZeroDivisionError
    assert "step" not in vars(sim) and "forward" not in vars(sim)
    sim.model._model.opt.integrator = mujoco.mjtIntegrator.mjINT_RK4
    with one_pass(sim):
        assert "step" not in vars(sim)
    made.close()
