"""Train a vision-language model by rewards, from an environment's tasks to an evaluation of the result."""

from __future__ import annotations

from prefect import flow
from pydantic import BaseModel

from components.batches.settings import BatchSettings
from components.contracts.machine import Machine
from components.environments.settings import EnvironmentSettings
from components.evaluation.settings import EvaluationSettings
from components.inference.settings import ServerSettings
from components.models.settings import ModelSettings
from components.rl.settings import PreflightSettings
from components.rollouts.settings import RolloutSettings
from components.sft.settings import WarmStartSettings
from components.training.settings import TrainerSettings
from tasks.flow_run import deployment_name, tracked_flow
from tasks.reports import Finding, promote_candidate, report
from tasks.run_stage import run


@flow(name="train-vlm", validate_parameters=True)
def train_vlm(
    model: ModelSettings,
    environment: EnvironmentSettings,
    inference: ServerSettings,
    rollouts: RolloutSettings,
    batches: BatchSettings,
    trainer: TrainerSettings,
    preflight: PreflightSettings,
    evaluation: EvaluationSettings,
    machine: Machine,
    warm_start: WarmStartSettings | None = None,
) -> list[str]:
    """Tasks and a model, GRPO on rollouts from a pool of vLLM servers, and an evaluation of the result.

    With a warm start the model is first trained on an expert's demonstrations.

    Args:
        model: Where the weights come from and what of them is trained.
        environment: What is played.
        inference: What the servers are told.
        rollouts: How much is played per step, and how tokens are sampled.
        batches: From rollouts to training samples.
        trainer: Objective, optimiser and number of steps.
        preflight: What trainer and server must agree on before the first step.
        evaluation: How the result is measured.
        machine: Facts of this machine; none changes the result.
        warm_start: Training on demonstrations before that on rewards; leave it out for none.
    """
    sections: dict[str, BaseModel] = {
        "model": model,
        "environment": environment,
        "inference": inference,
        "rollouts": rollouts,
        "batches": batches,
        "trainer": trainer,
        "preflight": preflight,
        "evaluation": evaluation,
        "machine": machine,
    }
    if warm_start is not None:
        sections["warm_start"] = warm_start
    with tracked_flow(sections) as tracking:
        tasks = run("tasks", sections, machine)
        start = run("model", sections, machine)
        stage, made = "before training", {}
        if warm_start is not None:
            start = run("sft", sections, machine, tasks=tasks, model=start)
            stage, made = "after warm start", {"warm start": start}
        trained = run("train-vlm", sections, machine, tasks=tasks, model=start)
        before = run("evaluate", sections, machine, tasks=tasks, model=start)
        after = run("evaluate", sections, machine, tasks=tasks, model=trained)
        candidate = promote_candidate(trained, f"train-vlm.{deployment_name()}")
        findings = [Finding(stage, before), Finding("after training", after)]
        return report(tracking, findings, {**made, "training": trained}, candidate)
