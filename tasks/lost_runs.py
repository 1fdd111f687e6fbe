"""Runs in MLflow whose process or machine is gone: who makes their artifact in their place ends them."""

from __future__ import annotations

from armature.tasks import mlflow_client as names
from armature.tasks.mlflow_client import client
from armature.tasks.tracking import TrackedRun


def take_the_place_of_lost_runs(run: TrackedRun, parent: TrackedRun | None, fingerprint: str) -> None:
    """Mark `run` as the one that makes an artifact; runs that made it before and never ended are KILLED, and so are the
    runs of their flows.

    The caller has the artifact's lock: nobody else makes it on this machine. A run that waits for the lock is not
    marked, and one of another machine that is not gone says by itself how it ends.
    """
    experiments = [each.experiment_id for each in client().search_experiments()]
    unfinished = f"tags.`{names.MAKES_TAG}` = '{fingerprint}' and attributes.status = 'RUNNING'"
    for lost in client().search_runs(experiments, unfinished):
        client().set_terminated(lost.info.run_id, "KILLED")
        flow = lost.data.tags.get(names.PARENT_TAG)
        if flow and flow != (parent.run_id if parent else None) and client().get_run(flow).info.status == "RUNNING":
            client().set_terminated(flow, "KILLED")
    run.tag({names.MAKES_TAG: fingerprint})
