"""Records the state of LIBERO's own meshes after ten random actions, which compact shapes must reproduce.

It needs the original assets: ARMATURE_LIBERO_ASSETS=/path/to/assets python -m tests.robots.libero.mesh_physics
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np

from armature.components.robots.libero.simulator import LiberoSimulator
from armature.components.robots.libero.tasks import suite_tasks

from .simulated import physics, simulator

RECORDED = Path(__file__).with_suffix(".json")
TASKS = [("libero_goal", 4), ("libero_object", 0), ("libero_spatial", 4)]


def end_state(suite: str, index: int, assets: Literal["compact"] | None) -> list[float]:
    """Return simulation time, positions and velocities after the actions. With `assets` None, LIBERO's own assets are
    used."""
    made = LiberoSimulator(suite_tasks(suite)[index], simulator(assets=assets))
    made.reset(1, 5)
    rng = np.random.default_rng(0)
    for _ in range(10):
        made.step(rng.uniform(-1, 1, 7))
    end: list[float] = physics(made).tolist()
    made.close()
    return end


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps({f"{suite}/{index}": end_state(suite, index, None) for suite, index in TASKS}) + "\n"
    )
