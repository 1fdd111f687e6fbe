"""Write games for ALFWorld, each of them won once by its plan."""

from __future__ import annotations

from prefect import flow

from components.contracts.machine import Machine
from components.environments.alfworld.stage import GamesStageSettings
from tasks.flow_run import tracked_flow
from tasks.reports import report
from tasks.run_stage import run


@flow(name="alfworld-games", validate_parameters=True)
def alfworld_games(games: GamesStageSettings, machine: Machine) -> list[str]:
    """Games in ALFWorld's own folder layout, for environments whose games have the source folder.

    Args:
        games: Which games, and how many of each split.
        machine: Facts of this machine; none changes the result.
    """
    sections = {"games": games, "machine": machine}
    with tracked_flow(sections) as tracking:
        written = run("alfworld-games", sections, machine)
        return report(tracking, [], {"games": written})
