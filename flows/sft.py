"""Train a vision-language model on the assistant's tokens of the user's conversations."""

from __future__ import annotations

from prefect import flow

from armature.components.vlm.sft.recipe import Sft
from armature.tasks.flow_run import deployment_name, tracked_flow
from armature.tasks.parameters import takes
from armature.tasks.reports import CheckpointResult, promote_candidate, report
from armature.tasks.run_stage import run


@flow(name="sft", validate_parameters=True)
@takes(Sft)
def sft(recipe: Sft) -> list[str]:
    with tracked_flow(recipe) as tracking:
        start = run("model", recipe)
        data = run("conversations", recipe, model=start)
        trained = run("sft", recipe, conversations=data, model=start)
        candidate = promote_candidate(trained, f"sft.{deployment_name()}", [])
        made = {"conversations": data, "training": trained}
        return report(tracking, [CheckpointResult("after training", trained)], made, candidate)
