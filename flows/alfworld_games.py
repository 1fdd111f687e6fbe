"""Write games for ALFWorld. Each game was won once by its planned solution."""

from __future__ import annotations

from prefect import flow

from armature.components.environments.alfworld.stage import AlfworldGames
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import report
from armature.tasks.run_stage import run


@flow(name="alfworld-games", validate_parameters=True)
@takes(AlfworldGames)
def alfworld_games(recipe: AlfworldGames) -> list[str]:
    with tracked_flow(recipe) as tracking:
        written = run("alfworld-games", recipe)
        return report(tracking, [], {"games": written})
