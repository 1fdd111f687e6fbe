"""Settings of the simulator for tests: nothing is fetched, little is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from components.environments.libero.settings import SimulatorSettings

needs_libero = pytest.mark.skipif(find_spec("libero") is None, reason="LIBERO is not installed")


def simulator(**changes: Any) -> SimulatorSettings:
    values: dict[str, Any] = {
        "camera_name_mapping": {"agentview_image": "image", "robot0_eye_in_hand_image": "image2"},
        "resolution": 32,
        "control_freq": 20,
        "num_steps_wait": 2,
        "reflections": False,
        "offscreen_samples": 0,
        "assets": "compact",
        "trusted_initial_states": (),
    }
    return SimulatorSettings.model_validate(values | changes)
