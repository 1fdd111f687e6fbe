"""Updates that are left out because their gradient is not finite."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from armature.components.contracts.errors import DivergedError

MOST_IN_A_ROW = 10
log = logging.getLogger(__name__)


@dataclass
class SkippedUpdates:
    """How many there were, in all and since the last update that was made. Checkpoints keep both."""

    total: int = 0
    in_a_row: int = 0

    def note(self, step: int, norm: object, applied: bool) -> None:
        """One update, applied or skipped.

        Raises:
            DivergedError: `MOST_IN_A_ROW` were left out one after the other.
        """
        if applied:
            self.in_a_row = 0
            return
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        log.error("step %d: the gradient is not finite (%s); skipping the optimizer step", step, norm)
        if self.in_a_row >= MOST_IN_A_ROW:
            raise DivergedError(
                f"the gradients of {self.in_a_row} updates in a row are not finite",
                code="gradients_not_finite",
                where=f"step {step}",
                remedy="lower the learning rate, and start again from a checkpoint before the first of them",
            )
