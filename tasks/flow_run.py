"""The flow's own run in MLflow, found by every task of the flow through the flow run's id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prefect.runtime import deployment, flow_run
from pydantic import BaseModel

from tasks import mlflow_client as names
from tasks.logs import readable_errors
from tasks.mlflow_client import client, experiment_id
from tasks.tracking import TrackedRun, tracked

DEPLOYMENT_TAG = "deployment:"


def deployment_name() -> str:
    """The deployment that runs: Prefect's, or the one that `armature run` put in the tags; else "custom"."""
    if deployment.name:
        return str(deployment.name)
    marked = [tag.removeprefix(DEPLOYMENT_TAG) for tag in flow_run.tags if tag.startswith(DEPLOYMENT_TAG)]
    return marked[0] if marked else "custom"


@contextmanager
def tracked_flow(sections: Mapping[str, BaseModel]) -> Iterator[TrackedRun]:
    """The flow's parent run in MLflow, with every section as parameters."""
    readable_errors()
    tags = {names.FLOW_RUN_TAG: str(flow_run.id), "armature.deployment": deployment_name()}
    name = f"{deployment_name()}-{flow_run.name}"
    with tracked(flow_run.flow_name, name, tags, sections) as run:
        yield run


def current_run() -> TrackedRun | None:
    """The MLflow run of the flow that this task belongs to."""
    experiment = experiment_id(str(flow_run.flow_name))
    found = client().search_runs(
        [experiment],
        f"tags.`{names.FLOW_RUN_TAG}` = '{flow_run.id}' and tags.`armature.deployment` != ''",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    return TrackedRun(found[0].info.run_id, experiment) if found else None
