"""Record demonstrations of a scripted policy."""

from __future__ import annotations

from prefect import flow

from armature.components.robots.recipes import Demonstrations
from armature.tasks.flow_run import tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import report
from armature.tasks.run_stage import run


@flow(name="demonstrations", validate_parameters=True)
@takes(Demonstrations)
def demonstrations(recipe: Demonstrations) -> list[str]:
    with tracked_flow(recipe) as tracking:
        recorded = run("demonstrations", recipe)
        return report(tracking, [], {"demonstrations": recorded})
