"""Simulator settings for tests, which download nothing and render little, and access to its state."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from armature.components.robots.libero.settings import SimulatorSettings
from armature.components.robots.libero.simulator import LiberoSimulator

needs_libero = pytest.mark.skipif(find_spec("libero") is None, reason="LIBERO is not installed")


def simulator(**changes: Any) -> SimulatorSettings:
    values: dict[str, Any] = {
        "camera_name_mapping": {"agentview_image": "image", "robot0_eye_in_hand_image": "image2"},
        "resolution": 32,
        "num_steps_wait": 2,
        "reflections": False,
        "offscreen_samples": 0,
        "assets": "compact",
    }
    return SimulatorSettings.model_validate(values | changes)


def physics(made: LiberoSimulator) -> NDArray[np.float64]:
    state: NDArray[np.float64] = made._control.get_sim_state()
    return state
