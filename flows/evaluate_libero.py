"""Evaluate one robot policy in LIBERO, or two on the same episodes."""

from __future__ import annotations

from prefect import flow
from pydantic import BaseModel

from components.contracts.machine import Machine
from components.environments.libero.settings import SimulatorSettings
from components.evaluation.libero.settings import CompareLiberoSettings, LiberoEvaluationSettings
from components.policies.settings import PolicySettings
from tasks.checkpoints import policy_artifact
from tasks.flow_run import tracked_flow
from tasks.reports import Finding, report
from tasks.run_stage import run


@flow(name="evaluate", validate_parameters=True)
def evaluate_libero(
    policy: PolicySettings,
    simulator: SimulatorSettings,
    evaluation: LiberoEvaluationSettings,
    comparison: CompareLiberoSettings,
    machine: Machine,
    against: PolicySettings | None = None,
) -> list[str]:
    """Play every task of some suites in the simulator, and say how many were solved.

    Args:
        policy: The policy.
        simulator: How LIBERO is simulated and drawn.
        evaluation: Which tasks, how often, and by which seeds.
        comparison: How the two are compared, where there is another.
        machine: Facts of this machine; none changes the result.
        against: Another policy, which plays the same episodes; leave it out for none.
    """
    sections: dict[str, BaseModel] = {
        "policy": policy,
        "simulator": simulator,
        "evaluation": evaluation,
        "comparison": comparison,
        "machine": machine,
    }
    if against is not None:
        sections["against"] = against
    with tracked_flow(sections) as tracking:
        played = run("evaluate-libero", sections, machine, policy=policy_artifact(policy, machine))
        findings, made = [Finding("policy", played)], {}
        if against is not None:
            other = run("evaluate-libero", sections, machine, policy=policy_artifact(against, machine))
            findings.append(Finding("against", other))
            made["comparison"] = run("compare-libero", sections, machine, first=other, second=played)
        return report(tracking, findings, made)
