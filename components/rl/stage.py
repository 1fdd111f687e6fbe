"""The stage train-vlm: a model and an environment's tasks in, a trained checkpoint with its history out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from components.contracts.stages import Artifact, Report, Stage, StageContext
from components.rl.settings import TrainVLMSettings

ENGINES = "mismatch_kl/first_update"
"""How far trainer and servers are apart, before an update of the step has moved the policy."""


def train_vlm(settings: TrainVLMSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext) -> Report:
    """Writes `checkpoint/` (Hugging Face layout), `history.json`, `metrics.json`, `lineage.json` and the report."""
    from components.models.source import CHECKPOINT
    from components.rl.loop import run_loop
    from components.rl.reporting import write_pages
    from components.rl.run import open_run
    from components.stages import open_store

    trainer = settings.trainer
    with open_run(settings, inputs, context, open_store(context.machine)) as (run, done):
        if done == 0:
            context.events.message("\n".join(["pre-flight: trainer and server agree", *run.preflight().lines()]))
        staleness = settings.rollouts.max_staleness
        run_loop(run, done + 1, trainer.max_steps, staleness, context.units, context.events)
        run.finish(out / CHECKPOINT)
        history, lineage, gallery = run.history.read(), run.lineage(), run.gallery
    _write_json(out / "history.json", history)
    _write_json(out / "lineage.json", lineage)
    _write_json(out / "metrics.json", summary(history))
    write_pages(out, settings, history, gallery, context.images)
    drops = _total(history, "failures/") | _total(history, "drops/")
    return Report(rows={"steps": len(history), "rollouts": _total(history, "rollouts/")["planned"]}, drops=drops)


def summary(history: list[dict[str, float]]) -> dict[str, float]:
    """The last tenth of the run in a few numbers."""
    tail = history[-max(1, len(history) // 10) :]
    keys = ("reward", "importance_ratio", "entropy", "mismatch_kl", "masked_fraction", "tokens/completion")
    means = {key: sum(step[key] for step in tail) / len(tail) for key in keys if all(key in step for step in tail)}
    kls = [step[ENGINES] for step in history if ENGINES in step]
    return means | ({"mismatch_kl_max": max(kls)} if kls else {})


def _total(history: list[dict[str, float]], prefix: str) -> dict[str, int]:
    names = sorted({name for step in history for name in step if name.startswith(prefix)})
    return {name.removeprefix(prefix): int(sum(step.get(name, 0) for step in history)) for name in names}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


TRAIN_VLM_STAGE = Stage("train-vlm", 1, TrainVLMSettings, ("tasks", "model"), train_vlm)
