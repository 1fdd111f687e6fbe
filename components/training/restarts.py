"""What is asked of a trainer that may die: it is started again, brought back to where it was, and asked again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from armature.components.contracts.errors import TrainerError
from armature.components.contracts.stages import Events
from armature.components.training.client import ServiceClient

MAX_RESTARTS = 3
T = TypeVar("T")


def with_restarts(
    trainer: ServiceClient, done: int, ask: Callable[[], T], replay: Callable[[int], object], events: Events
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


def run_steps(
    trainer: ServiceClient,
    steps: int,
    begin: Callable[[], object],
    one_step: Callable[[int], object],
    out: Path,
    events: Events,
) -> None:
    """Make the steps that the newest checkpoint lacks, and publish the weights after the last one to `out`.

    Args:
        begin: what is done before the first step.
        one_step: makes step 1, 2, ..., again if the trainer died after its last checkpoint, and saves.

    Raises:
        TrainerError: the trainer refuses, or dies again and again.
    """
    done = trainer.resume()
    if done:
        events.message(f"resuming after step {done}")
    else:
        with_restarts(trainer, 0, begin, one_step, events)
    for step in range(done + 1, steps + 1):
        with_restarts(trainer, step - 1, partial(one_step, step), one_step, events)
    with_restarts(trainer, steps, lambda: trainer.publish(out, steps), one_step, events)
    trainer.finish()
