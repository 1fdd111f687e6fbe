"""The stage `train-vla` with its trainer process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armature.components.configuration.stages import ThreadUnits
from armature.components.contracts.stages import Artifact
from armature.components.robots.imitation.settings import TrainVLASettings
from armature.components.robots.imitation.stage import TRAIN_VLA_STAGE, StageContext, summary
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
from tests.builders import make_machine

from .conftest import policy_settings
from .settings import training_settings


class RecordedEvents:
    """Records the events of a stage."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.numbers: dict[int, dict[str, float]] = {}

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        self.steps.append((name, done, total))

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.numbers[step] = dict(values)

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


@pytest.mark.slow
def test_stage_writes_policy_history_and_report(inputs: dict[str, Path], tmp_path: Path) -> None:
    settings = TrainVLASettings(policy=policy_settings(), training=training_settings(max_steps=3))
    out, events = tmp_path / "out", RecordedEvents()
    out.mkdir()
    context = StageContext(
        machine=make_machine(threads=1, loader_workers=0),
        events=events,
        units=ThreadUnits(),
        workspace=tmp_path / "work",
        images=tmp_path / "images",
        fingerprint="abc",
    )
    artifacts = {name: Artifact(kind=name, path=path, digest="0") for name, path in inputs.items()}
    report = TRAIN_VLA_STAGE.run(settings, artifacts, out, context)
    assert report.rows == {"steps": 3}
    assert events.steps == [("Training", step, 3) for step in range(4)]
    history = json.loads((out / "history.json").read_text())
    assert [row["step"] for row in history] == [0, 1, 2, 3]
    assert events.numbers[3] == {name: value for name, value in history[3].items() if name != "step"}
    numbers = json.loads((out / "metrics.json").read_text())
    assert numbers["action_error_ratio"] == pytest.approx(numbers["mean_action_error"] / numbers["action_error"])
    page = (out / "report.html").read_text()
    assert "Training of a tiny policy (full, continuous)" in page and "Error of held-out actions" in page
    assert load_policy(out).processor().action_dimensions == 3


def test_summary_averages_last_tenth_and_uses_last_measurement() -> None:
    def row(step: int, **more: float) -> dict[str, float]:
        parts = dict.fromkeys(("loss/flow", "loss/cross_entropy", "samples_per_second", "padding_fraction"), 0.5)
        return {"step": step, "loss": float(step), "updates_skipped": 1.0, "memory/peak_gib": 2.0} | parts | more

    def measured(loss: float, error: float) -> dict[str, float]:
        return {"heldout/loss": loss, "heldout/action_error": error, "heldout/mean_action_error": 0.8}

    history = [{"step": 0, **measured(3.0, 1.2)}, *(row(step) for step in range(1, 20)), row(20, **measured(1.0, 0.2))]
    numbers = summary(history)
    assert numbers["loss"] == 19.5
    assert (numbers["heldout_loss_before"], numbers["heldout_loss"]) == (3.0, 1.0)
    assert numbers["action_error_ratio"] == pytest.approx(4.0)
    assert "action_error" not in summary([row(1), row(2)])
