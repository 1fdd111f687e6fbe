"""Messages of a stage that waits."""

from __future__ import annotations

import time
from contextvars import ContextVar

import pytest

from armature.components.configuration.stages import TerminalEvents
from armature.components.contracts import stages
from armature.components.contracts.stages import report_waiting


def test_messages_say_what_a_stage_waits_for_and_end_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "SAY_AFTER", 0.05)
    monkeypatch.setattr(stages, "SAY_EVERY", 0.05)
    left = ["the trainer", "vllm-0"]
    with report_waiting(TerminalEvents(), lambda: ", ".join(left)):
        time.sleep(0.12)
        left.pop()
        time.sleep(0.12)
    lines = capsys.readouterr().out.splitlines()
    assert {"waiting for the trainer, vllm-0, 0 s so far", "waiting for the trainer, 0 s so far"} == set(lines)
    time.sleep(0.12)
    assert capsys.readouterr().out == ""


def test_messages_are_written_in_the_context_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "SAY_AFTER", 0.05)
    asks = ContextVar("asks", default="nobody")
    asks.set("a flow")
    with report_waiting(TerminalEvents(), asks.get):
        time.sleep(0.12)
    assert capsys.readouterr().out == "waiting for a flow, 0 s so far\n"


def test_quick_block_and_its_error_pass_without_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), report_waiting(TerminalEvents(), lambda: "nothing"):
        raise ValueError
    assert capsys.readouterr().out == ""
