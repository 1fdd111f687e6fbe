"""The stage train-vlm: a model and an environment's tasks in, a trained checkpoint with its history out."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from pathlib import Path

from components.contracts.numbers import write_json
from components.contracts.stages import Artifact, Stage, StageContext, StageReport
from components.environments.sources import environment_sources
from components.rl.agreement import FIRST_UPDATE
from components.rl.settings import TrainVLMSettings


def train_vlm(
    settings: TrainVLMSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Writes `checkpoint/` (Hugging Face layout), `history.json`, `metrics.json`, `lineage.json` and the report."""
    from components.models.source import CHECKPOINT
    from components.rl.open import open_run
    from components.rl.reporting import write_pages
    from components.stages import open_store

    with open_run(settings, inputs, context, open_store(context.machine)) as (run, done):
        run.train_from(done)
        run.finish(out / CHECKPOINT)
        history, lineage, gallery = run.history.read(), run.lineage(), run.gallery
    write_json(out / "history.json", history)
    write_json(out / "lineage.json", lineage)
    write_json(out / "metrics.json", summary(history))
    write_pages(out, settings, history, gallery, context.images)
    drops = _total(history, "failures/") | _total(history, "drops/")
    return StageReport(rows={"steps": len(history), "rollouts": _total(history, "rollouts/")["planned"]}, drops=drops)


def summary(history: list[dict[str, float]]) -> dict[str, float]:
    """The last tenth of the run in a few numbers."""
    tail = history[-max(1, len(history) // 10) :]
    keys = ("reward", "importance_ratio", "entropy", "mismatch_kl", "masked_fraction", "tokens/completion")
    means = {key: sum(step[key] for step in tail) / len(tail) for key in keys if all(key in step for step in tail)}
    kls = [step[FIRST_UPDATE] for step in history if FIRST_UPDATE in step]
    return means | ({"mismatch_kl_max": max(kls, key=lambda kl: (isnan(kl), kl))} if kls else {})


def _total(history: list[dict[str, float]], prefix: str) -> dict[str, int]:
    names = sorted({name for step in history for name in step if name.startswith(prefix)})
    return {name.removeprefix(prefix): int(sum(step.get(name, 0) for step in history)) for name in names}


TRAIN_VLM_STAGE = Stage(
    name="train-vlm",
    version=3,
    settings=TrainVLMSettings,
    inputs=("tasks", "model"),
    run=train_vlm,
    sources=lambda settings, inputs: environment_sources(settings.environment),
)
