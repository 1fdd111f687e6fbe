"""Train a vision-language model by rewards, from an environment's tasks to an evaluation of the result."""

from __future__ import annotations

from prefect import flow

from armature.components.evaluation.planned import planned_tasks
from armature.components.recipes import TrainVlm
from armature.tasks.flow_run import deployment_name, tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, promote_candidate, report
from armature.tasks.run_stage import run


@flow(name="train-vlm", validate_parameters=True)
@takes(TrainVlm)
def train_vlm(recipe: TrainVlm) -> list[str]:
    sections, machine = recipe.given(), recipe.machine
    with tracked_flow(sections) as tracking:
        tasks = run("tasks", sections, machine)
        planned_tasks(recipe.evaluation, tasks.path)  # what it refuses is known before the training
        start = run("model", sections, machine)
        stage, made = "before training", {}
        if recipe.warm_start is not None:
            start = run("sft", sections, machine, tasks=tasks, model=start)
            stage, made = "after warm start", {"warm start": start}
        trained = run("train-vlm", sections, machine, tasks=tasks, model=start)
        before = run("evaluate", sections, machine, of=stage, tasks=tasks, model=start)
        after = run("evaluate", sections, machine, of="after training", tasks=tasks, model=trained)
        findings = [CheckpointResult(stage, before), CheckpointResult("after training", after)]
        candidate = promote_candidate(trained, f"train-vlm.{deployment_name()}", findings)
        return report(tracking, findings, {**made, "training": trained}, candidate)
