"""Where MLflow keeps its records, and the few facts about them that more than one module needs."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

# Before mlflow is imported: nothing of a run leaves the machine.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

import mlflow
from mlflow import MlflowClient

STATE = Path(".armature")
UI_URL = "http://127.0.0.1:5000"

CONTEXT_TAG = "mlflow.data.context"
PARENT_TAG = "mlflow.parentRunId"
FLOW_RUN_TAG = "prefect.flow_run_id"
STAGE_TAG = "armature.stage"
DIGEST_TAG = "armature.digest"
CONFIG_TAG = "armature.config_digest"
COMMIT_TAG = "git.commit"
STEP_TAG = "armature.step"
INPUTS_TAG = "armature.inputs"


def tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, or a SQLite file in this folder."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    STATE.mkdir(exist_ok=True)
    return f"sqlite:///{(STATE / 'mlflow.db').resolve()}"


@cache
def _client(uri: str) -> MlflowClient:
    mlflow.set_tracking_uri(uri)  # create_external_model and register_model know no other way
    return MlflowClient(uri)


def client() -> MlflowClient:
    return _client(tracking_uri())


def experiment_id(name: str) -> str:
    """The experiment called `name`, made when it is not there."""
    found = client().get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = tracking_uri().startswith("sqlite:")
    folder = f"file://{(STATE / 'mlartifacts').resolve()}" if local else None
    return str(client().create_experiment(name, folder))


def served_by() -> str:
    """What has to run for `page` to open."""
    return "(while `armature up` runs)" if tracking_uri().startswith("sqlite:") else ""


def page(run_id: str, experiment: str) -> str:
    """The address of a run's page; for SQLite, where `armature up` serves it."""
    uri = tracking_uri()
    base = uri if uri.startswith("http") else UI_URL
    # MLflow opens on its GenAI pages unless told; runs are listed on the other ones.
    return f"{base.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"
