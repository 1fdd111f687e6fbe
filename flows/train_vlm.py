"""Train a vision-language model with reinforcement learning, and evaluate it before and after."""

from __future__ import annotations

from prefect import flow

from armature.components.evaluation.results import planned_tasks
from armature.components.rl.recipe import TrainVlm
from armature.tasks.flow_run import deployment_name, tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, promote_candidate, report
from armature.tasks.run_stage import run


@flow(name="train-vlm", validate_parameters=True)
@takes(TrainVlm)
def train_vlm(recipe: TrainVlm) -> list[str]:
    with tracked_flow(recipe) as tracking:
        tasks = run("tasks", recipe)
        planned_tasks(recipe.evaluation, tasks.path)  # invalid evaluation settings are errors before the training
        start = run("model", recipe)
        stage, made = "before training", {}
        if recipe.warm_start is not None:
            start = run("warm-start", recipe, tasks=tasks, model=start)
            stage, made = "after warm start", {"warm start": start}
        teachers = recipe.made_teachers(lambda name, of, **inputs: run(name, of, "of the teacher", **inputs))
        trained = run("train-vlm", recipe, "", tasks=tasks, model=start, **teachers)
        before = run("evaluate", recipe, of=stage, tasks=tasks, model=start)
        after = run("evaluate", recipe, of="after training", tasks=tasks, model=trained)
        findings = [CheckpointResult(stage, before), CheckpointResult("after training", after)]
        candidate = promote_candidate(trained, f"train-vlm.{deployment_name()}", findings)
        return report(tracking, findings, {**made, **teachers, "training": trained}, candidate)
