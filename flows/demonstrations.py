"""Record demonstrations of a scripted expert."""

from __future__ import annotations

from prefect import flow

from components.contracts.machine import Machine
from components.datasets.demonstrations.settings import DemonstrationSettings
from components.datasets.lerobot.writer import LayoutSettings
from components.environments.libero.settings import SimulatorSettings
from tasks.flow_run import tracked_flow
from tasks.reports import report
from tasks.run_stage import run


@flow(name="demonstrations", validate_parameters=True)
def demonstrations(
    simulator: SimulatorSettings, demonstrations: DemonstrationSettings, layout: LayoutSettings, machine: Machine
) -> list[str]:
    """A LeRobot dataset of the episodes in which the expert reached its goal, in LIBERO.

    Args:
        simulator: How LIBERO is simulated and drawn.
        demonstrations: Which tasks, and how often.
        layout: How the dataset is stored.
        machine: Facts of this machine; none changes the result.
    """
    sections = {"simulator": simulator, "demonstrations": demonstrations, "layout": layout, "machine": machine}
    with tracked_flow(sections) as tracking:
        recorded = run("demonstrations", sections, machine)
        return report(tracking, [], {"demonstrations": recorded})
