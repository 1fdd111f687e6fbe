"""Progress where the standard error is a file, and what the terminal leaves out of Prefect's log."""

from __future__ import annotations

import logging

import pytest

from armature.components.configuration.stages import TerminalEvents
from armature.tasks.logs import TerminalFilter


def test_piped_training_is_one_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    events = TerminalEvents()
    events.progress("Training", 0, 2)
    for step in (1, 2):
        for done in (1, 4):
            events.progress("rollouts", done, 4, rew=0.5)
        for done in (0, 3, 5):
            events.progress("evaluation", done, 5)
        events.progress("Training", step, 2, rew=step / 4)
    for done in (1, 4):
        events.progress("rollouts", done, 4, rew=0.75)
    events.close()
    printed = capsys.readouterr()
    assert "\r" not in printed.out + printed.err
    assert printed.err.splitlines() == [
        "Training 0/2",
        "evaluation 0/5",
        "Training 1/2 rew=0.25",
        "evaluation 0/5",
        "Training 2/2 rew=0.5",
        "rollouts 4/4 rew=0.75",
    ]


@pytest.mark.parametrize(
    ("logger", "level", "text", "has_pages", "shown"),
    [
        ("prefect.task_runs", logging.ERROR, "Encountered exception during execution", True, False),
        ("prefect.flow_runs", logging.INFO, "Finished in state Failed('...')", True, False),
        ("prefect.flow_runs", logging.INFO, "View at http://127.0.0.1:4200/runs/1", False, False),
        ("prefect.flow_runs", logging.INFO, "View at http://127.0.0.1:4200/runs/1", True, True),
        ("prefect.task_runs", logging.WARNING, "Retry 1/1", False, True),
        ("other", logging.ERROR, "View at", False, True),
    ],
)
def test_terminal_shows_no_link_that_nobody_serves_and_no_error_twice(
    logger: str, level: int, text: str, has_pages: bool, shown: bool
) -> None:
    record = logging.LogRecord(logger, level, "file.py", 1, text, (), None)
    assert TerminalFilter(has_pages).filter(record) is shown
