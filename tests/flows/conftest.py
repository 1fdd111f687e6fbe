"""Flows over stages that finish at once: real settings, artifacts, Prefect and MLflow; only the work is small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from armature.components.artifacts.manifest import read_manifest
from armature.components.configuration import Recipe, load_recipe
from armature.components.configuration.stages import STAGES
from armature.components.contracts.errors import DataError
from armature.components.contracts.stages import StageReport


def small_model(settings, inputs, folder, context):
    (folder / "weights.txt").write_text(settings.source)
    return StageReport()


def small_warm_start(settings, inputs, folder, context):
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint/weights.txt").write_text("warm")
    (folder / "history.json").write_text(json.dumps([{"step": step, "loss": 1 / step} for step in (1, 2)]))
    (folder / "metrics.json").write_text(json.dumps({"loss": 0.5}))
    (folder / "report.html").write_text("<title>warm start</title>")
    return StageReport(rows={"demonstrations": 4})


GAINS = {2e-3: 0.25, 4e-3: 0.125, 8e-3: -0.25}
"""Gain in accuracy by learning rate, for stages that replace trainings in tests."""


def small_training(settings, inputs, folder, context):
    (folder / "checkpoint").mkdir()
    rate = getattr(getattr(settings, "trainer", None), "learning_rate", 0.0)
    (folder / "checkpoint/weights.txt").write_text(str(GAINS.get(rate, 0.0)))
    history = [{"step": step, "reward": step / 4} for step in range(1, 5)]
    for row in history[2:]:  # the first two were reported by a process that died
        context.events.metrics({"reward": row["reward"]}, row["step"])
    (folder / "history.json").write_text(json.dumps(history))
    numbers = {"reward": 1.0}
    if hasattr(settings, "training"):
        error = 0.5 + settings.training.seed
        numbers |= {"action_error_before": 1.25, "action_error": error, "mean_action_error": 0.75}
    (folder / "metrics.json").write_text(json.dumps(numbers))
    (folder / "report.html").write_text("<title>report</title>")
    return StageReport(rows={"steps": 4})


def small_evaluation(settings, inputs, folder, context):
    if settings.evaluation.seed == 13:
        raise DataError("seed 13 brings no luck", where="evaluation.seed", remedy="take another")
    model = inputs["model"]
    gain = float((model.path / "checkpoint/weights.txt").read_text()) if model.kind == "train-vlm" else 0.0
    accuracy = 0.25 if model.kind == "warm-start" else 0.5 + settings.evaluation.seed / 100 + gain
    (folder / "metrics.json").write_text(json.dumps({"accuracy": accuracy}))
    return StageReport(rows={"episodes": 4})


def small_data(settings, inputs, folder, context):
    (folder / "report.html").write_text("<title>data</title>")
    return StageReport(rows={"episodes": 4})


def small_policy(settings, inputs, folder, context):
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint/weights.txt").write_text("random")
    return StageReport()


def small_play(settings, inputs, folder, context):
    if "unlucky" in str(read_manifest(inputs["policy"].path).settings):
        raise DataError("this policy brings no luck", where="policy", remedy="take another")
    trained = inputs["policy"].kind in ("train-vla", "train-vla-rl")
    (folder / "metrics.json").write_text(json.dumps({"success": 0.75 if trained else 0.0, "episodes": 4}))
    return StageReport(rows={"episodes": 4})


@pytest.fixture
def small_stages(monkeypatch) -> Iterator[None]:
    import sys
    import types

    runs = {"model": small_model, "warm-start": small_warm_start}
    runs |= {"train-vlm": small_training, "evaluate": small_evaluation}
    runs |= {"demonstrations": small_data, "dataset": small_data, "quantile-stats": small_data, "policy": small_policy}
    runs |= {
        "train-vla": small_training,
        "train-vla-rl": small_training,
        "evaluate-libero": small_play,
        "compare-libero": small_data,
        "compare-policies": small_data,
    }
    module = types.ModuleType("small_stages")
    for name, run in runs.items():
        setattr(module, name.replace("-", "_"), replace(STAGES[name], run=run))
    monkeypatch.setitem(sys.modules, "small_stages", module)
    for name in runs:
        monkeypatch.setitem(STAGES._entries, name, f"small_stages:{name.replace('-', '_')}")
    yield


@pytest.fixture
def recipe(tmp_path):
    """A function that loads a recipe of configs/ with overrides. Its store is in the test's folder."""

    def load(name: str, *overrides: str) -> Recipe:
        return load_recipe(name, [*overrides, f"machine.store={tmp_path / 'store'}"])

    return load
