"""Train a robot policy on demonstrations, from the simulator or of a dataset, to an evaluation in LIBERO."""

from __future__ import annotations

from prefect import flow
from pydantic import BaseModel

from components.contracts.machine import Machine
from components.datasets.demonstrations.settings import DemonstrationSettings
from components.datasets.lerobot.writer import LayoutSettings
from components.datasets.settings import DatasetSettings, QuantileStatsSettings
from components.environments.libero.settings import SimulatorSettings
from components.evaluation.libero.settings import CompareLiberoSettings, LiberoEvaluationSettings
from components.policies.settings import PolicySettings
from components.vla.settings import VlaTrainerSettings
from tasks.flow_run import deployment_name, tracked_flow
from tasks.reports import Finding, promote_candidate, report
from tasks.run_stage import run
from tasks.training_data import training_data


@flow(name="train-vla", validate_parameters=True)
def train_vla(
    policy: PolicySettings,
    statistics: QuantileStatsSettings,
    training: VlaTrainerSettings,
    simulator: SimulatorSettings,
    evaluation: LiberoEvaluationSettings,
    machine: Machine,
    dataset: DatasetSettings | None = None,
    demonstrations: DemonstrationSettings | None = None,
    layout: LayoutSettings | None = None,
    comparison: CompareLiberoSettings | None = None,
) -> list[str]:
    """A dataset, its statistics and a policy, training, and an evaluation of the result in the simulator.

    The data are a dataset, or demonstrations that a scripted expert gives in the simulator: one of the two.

    Args:
        policy: Where the weights come from, and what the policy is told of the robot.
        statistics: What is measured of the data, for normalisation.
        training: What of the policy is trained, and how.
        simulator: How LIBERO is simulated and drawn.
        evaluation: Which tasks the result is played on, how often, and by which seeds.
        machine: Facts of this machine; none changes the result.
        dataset: The dataset, or several to be mixed.
        demonstrations: What the expert demonstrates, in place of a dataset.
        layout: How the demonstrations are stored; goes with them.
        comparison: Evaluates the policy before training as well, and compares; it has to know the robot then.
    """
    sections: dict[str, BaseModel] = {
        "policy": policy,
        "statistics": statistics,
        "training": training,
        "simulator": simulator,
        "evaluation": evaluation,
        "machine": machine,
    }
    chosen = {"dataset": dataset, "demonstrations": demonstrations, "layout": layout, "comparison": comparison}
    sections |= {name: section for name, section in chosen.items() if section is not None}
    with tracked_flow(sections) as tracking:
        data = training_data(sections, machine)
        measured = run("quantile-stats", sections, machine, dataset=data)
        start = run("policy", sections, machine)
        trained = run("train-vla", sections, machine, policy=start, dataset=data, statistics=measured)
        after = run("evaluate-libero", sections, machine, policy=trained)
        findings, made = [Finding("after training", after)], {"data": data, "statistics": measured, "training": trained}
        if comparison is not None:
            before = run("evaluate-libero", sections, machine, policy=start)
            made["comparison"] = run("compare-libero", sections, machine, first=before, second=after)
            findings.insert(0, Finding("before training", before))
        candidate = promote_candidate(trained, f"train-vla.{deployment_name()}")
        return report(tracking, findings, made, candidate)
