"""One sample that a robot policy learns from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation


@dataclass(frozen=True)
class RobotSample:
    """A frame, and the actions from it on, in the dataset's units.

    actions: float32 (T, action dimensions); after the episode's last frame its action stands again.
    padding: bool (T,), True where it does.
    tag: whose statistics scale it. `source` is the mixture's number of the dataset, `frame` counts in the episode.
    """

    observation: RobotObservation
    actions: NDArray[np.float32]
    padding: NDArray[np.bool_]
    tag: str
    source: int
    episode: int
    frame: int
