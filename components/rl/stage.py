"""The stage `train-vlm`: trains a model on an environment's tasks, and writes a checkpoint with its history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import isnan
from pathlib import Path

from armature.components.artifacts.sources import code_digest
from armature.components.contracts.metrics import counted_reasons, last_tenth, merged, write_json
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.make import environment_sources, evaluated_sources
from armature.components.environments.stage import read_environment
from armature.components.machine.hub import COMMIT
from armature.components.machine.project import find_module
from armature.components.models.gguf import model_source
from armature.components.models.source import folder_sources
from armature.components.rl.agreement import FIRST_UPDATE
from armature.components.rl.settings import TrainVLMSettings, teacher_input
from armature.components.vlm.settings import FunctionObjective


def train_vlm(
    settings: TrainVLMSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Run the stage, and write the results to `out`.

    It writes `checkpoint/` (Hugging Face layout), `history.json`, `metrics.json`, `lineage.json`, `report.html`, and
    `difficulty.parquet` with the rewards of the groups of each task. With evaluations during training the checkpoint
    has the weights of the best one.
    """
    from armature.components.artifacts.tables import write_table
    from armature.components.configuration.stages import open_store
    from armature.components.rl.open import open_run
    from armature.components.rl.reporting import write_pages
    from armature.components.rollouts.sampler import DIFFICULTY, difficulty, difficulty_counts

    with open_run(settings, inputs, context, open_store(context.machine)) as (run, done):
        last, history, best = run.train_into(out, done)
        shown = [run.shown(step) for step in sorted({1, last}) if step <= last]
        tasks = difficulty(run.groups(last))
    steps = [row for row in history if row["step"] > 0]
    write_json(out / "metrics.json", merged(run=summary(steps), best=best, tasks=difficulty_counts(tasks)))
    write_table(out / "difficulty.parquet", [asdict(task) for task in tasks], DIFFICULTY)
    write_pages(out, settings, history, shown, context, best, difficulty_counts(tasks))
    rows = {"steps": len(steps), "rollouts": int(sum(step.get("rollouts/planned", 0) for step in history))}
    return StageReport(rows=rows, drops=counted_reasons(history))


def summary(history: list[dict[str, float]]) -> dict[str, float]:
    """Return means of important metrics over the last tenth of the run."""
    keys = ("reward", "importance_ratio", "entropy", "mismatch_kl", "masked_fraction", "tokens/completion")
    kls = [step[FIRST_UPDATE] for step in history if FIRST_UPDATE in step]
    return last_tenth(history, keys) | ({"mismatch_kl_max": max(kls, key=lambda kl: (isnan(kl), kl))} if kls else {})


def played_as_listed(
    settings: TrainVLMSettings, inputs: Mapping[str, Artifact], say: Callable[[str], None]
) -> TrainVLMSettings:
    """Replace a branch or tag of the environment by the commit at which its tasks were listed."""
    environment = settings.environment
    revision = environment.args.get("revision")
    if revision is None or COMMIT.fullmatch(revision):
        return settings
    listed = read_environment(inputs["tasks"].path)
    reserved = {key: listed.args[key] for key in ("reserved_tokens",) if key in listed.args}  # of the recipe's model
    played = environment.model_copy(update={"args": environment.args | {"revision": listed.args.get("revision")}})
    if listed != played.model_copy(update={"args": played.args | reserved}):
        return settings
    return settings.model_copy(update={"environment": played})


def sources(settings: TrainVLMSettings, inputs: Mapping[str, Artifact]) -> Mapping[str, str]:
    """Return digests of the environment's code and data, of the code of a user's objective, and of teachers' files.

    Raises:
        ConfigurationError: some of the code or data is missing.
    """
    digests = (evaluated_sources if settings.evaluation else environment_sources)(settings.environment)
    for kind, teacher in settings.teacher.models.items() if settings.teacher is not None else ():
        files = folder_sources(model_source(teacher.source)) if teacher.source else {}
        digests = {**digests, **{f"{teacher_input(kind)}/{name}": digest for name, digest in files.items()}}
    if isinstance(objective := settings.trainer.objective, FunctionObjective):
        module = objective.function.partition(":")[0]
        find_module(module)
        return digests | {"objective": code_digest(module)}
    return digests


def trained_teachers(settings: TrainVLMSettings) -> tuple[str, ...]:
    """Return the names of the inputs with the checkpoints of teachers that other recipes train."""
    models = settings.teacher.models if settings.teacher is not None else {}
    return tuple(teacher_input(kind) for kind, teacher in models.items() if teacher.recipe)


TRAIN_VLM_STAGE = Stage(
    name="train-vlm",
    version=6,
    settings=TrainVLMSettings,
    inputs=("tasks", "model"),
    run=train_vlm,
    sources=sources,
    resolve=played_as_listed,
    more_inputs=trained_teachers,
)
