"""What is asked of a trainer that may die: it is started again, brought back to where it was, and asked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from components.contracts.errors import TrainerError
from components.contracts.stages import Events

MAX_RESTARTS = 3
T = TypeVar("T")


class Restartable(Protocol):
    """A trainer that may die, as `TrainerClient` is."""

    @property
    def alive(self) -> bool: ...

    def restart(self) -> None: ...

    def resume(self) -> int: ...


def with_restarts(
    trainer: Restartable, done: int, ask: Callable[[], T], replay: Callable[[int], object], events: Events
) -> T:
    """The answer of `ask`, which needs the weights after step `done`.

    A trainer that dies is started again from its newest checkpoint, and `replay` applies the steps up to `done` that
    the checkpoint lacks. A trainer that fails but lives is not restarted.

    Raises:
        TrainerError: it died `MAX_RESTARTS` + 1 times, or failed without dying.
    """
    restarts = 0
    while True:
        try:
            if restarts:
                trainer.restart()
                for step in range(trainer.resume() + 1, done + 1):
                    replay(step)
            return ask()
        except TrainerError as error:
            if trainer.alive or restarts == MAX_RESTARTS:
                raise
            events.message(f"the trainer died after step {done}; starting it again\n{error}")
            restarts += 1
