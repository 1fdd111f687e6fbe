"""What robosuite computes three times for each step of the physics, computed once, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def one_pass(sim: Any) -> Iterator[None]:
    """Inside, each step of the physics of robosuite's `sim` has one pass of forward dynamics.

    Before a step, robosuite asks for all of the forward dynamics twice: for itself and for the controller, which reads
    positions, velocities, Jacobians and masses. `mj_step` then begins with a third time, with the new controls.
    `mj_step1` is the part that does not depend on controls, and `mj_step2` the rest: together they are `mj_step`, as
    MuJoCo documents it, but for the integrator RK4, whose physics stays as it is.

    Nothing but controls may be changed between `sim.forward` and `sim.step`.
    """
    import mujoco

    model, data = sim.model._model, sim.data._data
    if model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4:
        yield
        return
    ready = False

    def forward() -> None:
        nonlocal ready
        if not ready:
            mujoco.mj_step1(model, data)
            ready = True

    def step(with_udd: bool = True) -> None:
        nonlocal ready
        forward()
        mujoco.mj_step2(model, data)
        ready = False

    sim.forward, sim.step = forward, step  # in front of the methods of the class
    try:
        yield
    finally:
        del sim.forward, sim.step
