"""Evaluate one checkpoint."""

from __future__ import annotations

from prefect import flow

from components.contracts.machine import Machine
from components.environments.settings import EnvironmentSettings
from components.evaluation.settings import EvaluationSettings
from components.evaluation.subjects import SubjectSettings
from components.inference.settings import ServerSettings
from components.models.settings import ModelSettings
from tasks.checkpoints import checkpoint_artifact
from tasks.flow_run import tracked_flow
from tasks.reports import Finding, report
from tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
def evaluate(
    subject: SubjectSettings,
    model: ModelSettings,
    environment: EnvironmentSettings,
    inference: ServerSettings,
    evaluation: EvaluationSettings,
    machine: Machine,
) -> list[str]:
    """Play every task of a split with one checkpoint, and say how many were solved.

    Args:
        subject: The checkpoint.
        model: How a checkpoint that is only a name is loaded.
        environment: What is played.
        inference: What the servers are told.
        evaluation: Which tasks, how often, and what counts as solved.
        machine: Facts of this machine; none changes the result.
    """
    sections = {
        "subject": subject,
        "model": model,
        "environment": environment,
        "inference": inference,
        "evaluation": evaluation,
        "machine": machine,
    }
    with tracked_flow(sections) as tracking:
        tasks = run("tasks", sections, machine)
        checkpoint = checkpoint_artifact(subject.checkpoint, model, machine)
        result = run("evaluate", sections, machine, tasks=tasks, model=checkpoint)
        return report(tracking, [Finding(subject.checkpoint, result)], {})
