"""Episodes of the scripted policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.environments.libero.scripted.plans import plan_for
from armature.components.environments.libero.scripted.policy import ScriptedPolicy

if TYPE_CHECKING:
    from armature.components.environments.libero.simulator import LiberoSimulator


@dataclass(frozen=True)
class DemonstrationOutcome:
    """How an episode ended. `phase` is the policy's last one, `retries` how often it took the object again."""

    success: bool
    steps: int
    phase: str
    retries: int


def demonstrate(
    simulator: LiberoSimulator, initial_state: int, seed: int, noise: float, limit: int, watch: bool = True
) -> Iterator[tuple[RobotObservation, NDArray[np.float32]] | DemonstrationOutcome]:
    """Each step's (observation, action), then how it ended: success if the goal holds at the end.

    Args:
        seed: Of the fixtures' places and of the noise.
        noise: Standard deviation of what is added to the three motions before they are carried out. The action that
            is given back is the scripted policy's own, so that who learns from it sees how one comes back to the way.
        limit: Most steps.
        watch: Without it, nothing is drawn and no step is given back.

    Raises:
        ConfigurationError: the scripted policy cannot do the task.
    """
    simulator.reset(initial_state, seed)
    controller, rng = ScriptedPolicy(plan_for(simulator)), np.random.default_rng(seed)
    success, steps = False, 0
    while not (controller.over or (success and simulator.reaching)) and steps < limit:
        action = controller.act(simulator.observed).astype(np.float32)
        if watch:
            yield simulator.observe(), action
        disturbed = action.copy()
        disturbed[:3] += rng.normal(0.0, noise, 3).astype(np.float32)
        success, steps = simulator.step(disturbed), steps + 1
    yield DemonstrationOutcome(
        success and (controller.phase == "done" or simulator.reaching), steps, controller.phase, controller.retries
    )
