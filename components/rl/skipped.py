"""Batches of a run that are not trained on, because somebody named them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from components.contracts.errors import ConfigurationError

FILE = "skipped-batches.json"


def skipped_batches(workspace: Path, named: Collection[int], done: int, last: int) -> frozenset[int]:
    """The steps to make without an update: those named now, and those named when the run was started before.

    Raises:
        ConfigurationError: a step that the weights contain already, or that the run does not have.
    """
    file = workspace / FILE
    before: set[int] = set(json.loads(file.read_text())) if file.exists() else set()
    new = set(named) - before
    if wrong := sorted(step for step in new if step <= done or step > last):
        raise ConfigurationError(
            f"the batches of steps {', '.join(map(str, wrong))} cannot be skipped: {done} of {last} steps are made",
            where="machine.skip_batches",
            remedy="name steps that are still to come, or delete the checkpoints after the step before",
        )
    if new:
        file.write_text(json.dumps(sorted(before | new)))
    return frozenset(before | new)
