"""The MLflow client, the address it uses, and the names of the tags that several modules read and write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

# These are set before mlflow is imported. Without the first, MLflow would report usage over the network.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
# MLflow's default is to retry for minutes without a log line. tasks/patience.py decides how long we wait.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

import mlflow
from mlflow import MlflowClient
from mlflow.environment_variables import (
    MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR,
    MLFLOW_HTTP_REQUEST_MAX_RETRIES,
    MLFLOW_HTTP_REQUEST_TIMEOUT,
)
from mlflow.exceptions import MlflowException
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import home_folder
from armature.components.contracts.secrets import without_passwords
from armature.components.machine.private_files import database_lock, sqlite_url
from armature.tasks.patience import patiently

STATE = home_folder() / ".armature"
UI_URL = "http://127.0.0.1:5000"
"""Address at which `armature up` serves MLflow's pages."""

CONTEXT_TAG = "mlflow.data.context"
PARENT_TAG = "mlflow.parentRunId"
FLOW_RUN_TAG = "prefect.flow_run_id"
STAGE_TAG = "armature.stage"
DIGEST_TAG = "armature.digest"
CONFIG_TAG = "armature.config_digest"
COMMIT_TAG = "git.commit"
STEP_TAG = "armature.step"
INPUTS_TAG = "armature.inputs"
MAKES_TAG = "armature.makes"
"""Tag of a stage's run: fingerprint of the artifact that it makes. It is set once the run holds the artifact's lock."""


def tracking_uri() -> str:
    """Return the address of MLflow: `MLFLOW_TRACKING_URI`, or else a SQLite file in the folder `.armature`."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    return sqlite_url(STATE / "mlflow.db", "pysqlite")


def shown_uri() -> str:
    """Return the address of MLflow without user name and password, for messages and records."""
    return without_passwords(tracking_uri())


class _RetryingClient:
    """MLflow's client. Each of its methods is retried while MLflow does not answer, see `patiently`."""

    def __init__(self, uri: str) -> None:
        mlflow.set_tracking_uri(uri)  # create_external_model and register_model read nothing else
        self._client = MlflowClient(uri)

    def __getattr__(self, name: str) -> Any:
        return patiently(shown_uri(), getattr(self._client, name))


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Hold a lock for MLflow's SQLite file while the block runs; create the file if it does not exist.

    With the lock, runs that start at the same time create its tables and experiments only once. If `uri` is not the
    address of a SQLite file, nothing is locked.
    """
    database = make_url(uri).database if uri.startswith("sqlite") else None
    if not database:
        yield
        return
    with database_lock(Path(database)):
        if not Path(database).exists() or not Path(database).stat().st_size:
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            # MLflow puts the folder of its default experiment into SQL without escaping, so we pass it as a URI.
            SqlAlchemyStore(uri, _artifacts())
        yield


def _artifacts() -> str:
    """Return the URI of the folder in which MLflow keeps files, if it runs without a server."""
    return (STATE / "mlartifacts").resolve().as_uri()


@cache
def _client(uri: str) -> MlflowClient:
    """Return the MLflow client of an address, the same object in every call; see `client`."""
    for variable in (MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT, MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR):
        try:
            variable.get()
        except ValueError as error:
            raise ConfigurationError(
                f"not a number: {error}",
                code="invalid_mlflow_variable",
                where=variable.name,
                remedy="correct or unset it",
            ) from error
    try:
        with _alone(uri):
            return cast(MlflowClient, patiently(shown_uri(), _RetryingClient)(uri))
    except (MlflowException, ArgumentError, ValueError) as error:
        raise ConfigurationError(
            without_passwords(f"MLflow cannot use this address: {error}"),
            code="invalid_mlflow_address",
            where=f"MLFLOW_TRACKING_URI = {shown_uri()}",
            remedy="give http://HOST:PORT or sqlite:///FILE, or unset it",
        ) from error


def client() -> MlflowClient:
    """Return the MLflow client for the address `tracking_uri()`.

    Its methods are retried while MLflow does not answer, and then raise TrackingError, see `patiently`.

    Raises:
        ConfigurationError: the address or one of MLflow's environment variables is invalid.
    """
    return _client(tracking_uri())


def experiment_id(name: str) -> str:
    """Return the id of the experiment called `name`, and create the experiment if it does not exist."""
    uri = tracking_uri()
    mlflow_client = client()
    with _alone(uri):
        experiment = mlflow_client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        folder = _artifacts() if uri.startswith("sqlite") else None
        return str(mlflow_client.create_experiment(name, folder))


def where_served(run_id: str, experiment: str) -> str:
    """Return the address of a run's page, or the run's id and the command that serves its page.

    Nobody serves the pages of a SQLite file unless `armature up` runs, which a run would have joined.
    """
    if tracking_uri().startswith("sqlite"):
        return f"run {run_id}; `armature up` serves its page"
    return page(run_id, experiment)


def page(run_id: str, experiment: str) -> str:
    """Return the address of a run's page in MLflow.

    If MLflow is a SQLite file, it is the address at which `armature up` serves the page. `experiment` is the id of the
    run's experiment.
    """
    uri = tracking_uri()
    base = shown_uri() if uri.startswith("http") else UI_URL
    # Without workflowType, MLflow opens its GenAI pages, which do not list runs.
    return f"{base.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"
