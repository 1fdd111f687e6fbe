"""Observations of a robot, and the protocol of policies that answer with chunks of actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PreviousActions:
    """The actions that the robot has not executed yet, of the chunk that it executes while it waits for the next one.

    actions: float32 (steps, action dimensions) in the dataset's units; the first one belongs to the time step of the
        observation.
    delay: number of these actions that the robot will have executed when the answer arrives.
    """

    actions: NDArray[np.float32]
    delay: int


@dataclass(frozen=True)
class RobotObservation:
    """The observation of one time step, in the form of a row of a dataset.

    images: maps the dataset's camera keys to upright uint8 RGB images (height, width, 3).
    state: float32 (state dimensions,), in the dataset's units.
    task: the instruction in words.
    previous: actions that the new chunk should continue, if the policy supports this; None: start a new chunk.

    Example:
        >>> RobotObservation({}, np.zeros(7, np.float32), "pick up the bowl").previous is None
        True
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    task: str
    previous: PreviousActions | None = None


class RobotPolicy(Protocol):
    """A policy that answers observations with chunks of actions.

    Row i of a prediction depends only on observation i and seed i, to the last bit: not on the number, order or content
    of the other rows.
    """

    n_action_steps: int
    action_dimensions: int

    @property
    def rows_per_pass(self) -> int:
        """Number of observations that one forward pass computes. A pass with fewer observations takes the same time."""

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        """Return the observation after all preprocessing that needs no other observation. Any thread may call this.

        Raises:
            DataError: the policy cannot read the observation.
        """

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        """Return one chunk of actions for each observation.

        The actions are float32 of shape (observations, n_action_steps, action_dimensions), in the dataset's units.

        Args:
            seeds: one seed per observation, from which the initial noise of its actions is drawn.
        """

    def facts(self) -> dict[str, Any]:
        """Return facts about the policy for reports."""
