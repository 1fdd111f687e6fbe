"""What a robot sees, and what a policy answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PreviousActions:
    """What is left of the chunk that the robot carries out while it waits for the next.

    actions: float32 (steps, action dimensions) in the dataset's units, the first one that of the observation's moment.
    delay: of them, how many will have been carried out when the answer comes.
    """

    actions: NDArray[np.float32]
    delay: int


@dataclass(frozen=True)
class RobotObservation:
    """One moment, as a dataset records it.

    images: camera key, as the dataset names it, to uint8 RGB (height, width, 3), upright.
    state: float32 (state dimensions,), in the dataset's units.
    task: what is to be done, in words.
    previous: actions that the answer is to continue, where the policy can; None: it continues nothing.
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    task: str
    previous: PreviousActions | None = None


class RobotPolicy(Protocol):
    """Answers observations with chunks of actions.

    Row i depends on observation i and seed i alone, to the last bit: not on the other rows, their number or order.
    """

    n_action_steps: int
    action_dimensions: int

    @property
    def rows_per_pass(self) -> int:
        """Of one forward pass, which takes as long for fewer."""

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        """The same, with all that the policy computes of it alone done already; any thread may call this.

        Raises:
            DataError: the policy cannot read the observation.
        """

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        """Actions in the dataset's units: float32 (rows, n_action_steps, action_dimensions).

        Args:
            seeds: One per row; the noise that the row's sampling begins with is drawn from it.
        """

    def facts(self) -> dict[str, Any]:
        """What a report says of the policy."""
