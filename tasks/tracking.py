"""Write runs to MLflow: one run for each flow run and a nested run for each stage, with links to artifacts.

Artifacts are not uploaded. A dataset or a model in MLflow consists of a name, the artifact's digest and its path.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
    RunTag,
)
from pydantic import BaseModel

from armature.components.artifacts.manifest import read_manifest
from armature.components.contracts.digests import document_digest
from armature.components.contracts.errors import TrackingError
from armature.components.contracts.installation import installed_commit
from armature.components.contracts.metrics import metric_part
from armature.components.contracts.stages import Artifact
from armature.tasks import mlflow_client as names
from armature.tasks.mlflow_client import client, experiment_id, page
from armature.tasks.patience import patience, patiently


def end_lost_runs(run: TrackedRun, parent: TrackedRun | None, fingerprint: str) -> None:
    """Mark `run` as the one that makes an artifact, and end earlier MLflow runs that made it and were lost.

    A run is lost if its process or machine is gone while MLflow still has it as RUNNING. Such runs, and the runs of
    their flows, get the status KILLED. The caller holds the artifact's lock, so no other process makes the artifact on
    this machine. A run that waits for the lock has no mark yet, and a run on another machine that is still alive sets
    its own status when it ends.

    Args:
        run: the stage's run.
        parent: the run of the flow to which the stage belongs.
        fingerprint: fingerprint of the artifact that the stage makes.
    """
    experiments = [each.experiment_id for each in client().search_experiments()]
    unfinished = f"tags.`{names.MAKES_TAG}` = '{fingerprint}' and attributes.status = 'RUNNING'"
    for lost in client().search_runs(experiments, unfinished):
        client().set_terminated(lost.info.run_id, "KILLED")
        flow = lost.data.tags.get(names.PARENT_TAG)
        if flow and flow != (parent.run_id if parent else None) and client().get_run(flow).info.status == "RUNNING":
            client().set_terminated(flow, "KILLED")
    run.tag({names.MAKES_TAG: fingerprint})


MetricPoint = tuple[str, float, int, int]
"""One value of a metric: name of the metric, value, time in milliseconds since 1970, and step."""

_FIRST_SECONDS = 20.0
"""Seconds that a flow waits for MLflow at its start, when nothing is lost by failing. Later calls wait for minutes."""

_PARAMS_PER_CALL, _METRICS_PER_CALL, _PARAM_LENGTH = 100, 1000, 6000
"""MLflow's limits on the parameters and on the metrics in one call, and on the characters of a parameter's value."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested tables by dotted key. All values are texts; lists and numbers are written as JSON.

    Example:
        >>> flatten({"trainer": {"max_steps": 3}, "seeds": [1, 2]})
        {'trainer.max_steps': '3', 'seeds': '[1, 2]'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{metric_part(key)}"  # users choose keys of an environment's settings, in any characters
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def user_name() -> str:
    """Return the name of the user who runs this process; the numeric user id if the user has no name, as in some
    containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@dataclass(frozen=True)
class TrackedRun:
    """One run in MLflow."""

    run_id: str
    experiment: str

    @property
    def page(self) -> str:
        """Address of the run's page in MLflow."""
        return page(self.run_id, self.experiment)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log nested settings as the run's parameters, by dotted key."""
        params = [Param(key, value[:_PARAM_LENGTH]) for key, value in flatten(values).items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            client().log_batch(self.run_id, params=params[start : start + _PARAMS_PER_CALL])

    def log_metrics(
        self, points: Sequence[MetricPoint], model: LoggedModel | None = None, dataset: Artifact | None = None
    ) -> None:
        """Log metrics, linked to the model and the dataset that they were measured on, if there are any."""
        link: dict[str, str | None] = {"model_id": model.model_id if model else None}
        if dataset:
            link |= {"dataset_name": dataset.kind, "dataset_digest": dataset.digest}
        metrics = [Metric(key, value, when, step, **link) for key, value, when, step in points]
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            client().log_batch(self.run_id, metrics=metrics[start : start + _METRICS_PER_CALL])

    def log_numbers(
        self, values: Mapping[str, float], model: LoggedModel | None = None, dataset: Artifact | None = None
    ) -> None:
        """Log metrics that have one value for the whole run. They are logged at step 0.

        They are linked to the model and the dataset on which they were measured, if there are any.
        """
        now = int(time.time() * 1000)
        self.log_metrics([(key, float(value), now, 0) for key, value in values.items()], model, dataset)

    def log_artifacts(self, artifacts: Sequence[tuple[Artifact, str, int | None]]) -> None:
        """Log artifacts as MLflow datasets with their digest, role ("input" or "output") and step."""
        if artifacts:
            client().log_inputs(self.run_id, [_as_dataset(*each) for each in artifacts])

    def tag(self, tags: Mapping[str, str]) -> None:
        client().log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log_file(self, path: Path) -> None:
        """Copy a file to the files that MLflow keeps for the run."""
        client().log_artifact(self.run_id, str(path))

    def log_model(self, name: str, checkpoint: Artifact, role: str) -> LoggedModel:
        """Log a checkpoint as an MLflow model in the role "input" or "output", and return the model.

        If a model with the checkpoint's digest exists already, it is used and no new one is created.
        """
        model = find_model(checkpoint.digest)
        if role == "input":
            model = model or self._create_model(name, checkpoint)
            client().log_inputs(self.run_id, models=[LoggedModelInput(model.model_id)])
        elif model is None:
            model = self._create_model(name, checkpoint)
            client().log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=0)])
        return model

    def _create_model(self, name: str, checkpoint: Artifact) -> LoggedModel:
        """Create the MLflow model of a checkpoint. MLflow stores only the checkpoint's path and digest."""
        client()
        return patiently(names.shown_uri(), mlflow.create_external_model)(
            name=name.replace("/", "."),
            source_run_id=self.run_id,
            experiment_id=self.experiment,
            tags={"checkpoint.uri": str(checkpoint.path), "checkpoint.digest": checkpoint.digest},
            model_type="checkpoint",
        )

    def close(self, status: str = "FINISHED") -> None:
        """End the run with a status of MLflow: FINISHED, FAILED or KILLED."""
        client().set_terminated(self.run_id, status)


def _as_dataset(artifact: Artifact, role: str, step: int | None) -> DatasetInput:
    """Return the MLflow dataset that describes an artifact: its digest, path, role, step and inputs."""
    inputs = json.dumps(read_manifest(artifact.path).inputs, separators=(",", ":"))
    tags = {names.CONTEXT_TAG: role, names.INPUTS_TAG: inputs}
    if step is not None:
        tags[names.STEP_TAG] = str(step)
    name = artifact.kind if step is None else f"{artifact.kind}-{step}"
    described = Dataset(name, artifact.digest, "local", json.dumps({"uri": str(artifact.path)}))
    return DatasetInput(described, [InputTag(key, value) for key, value in tags.items()])


def find_model(digest: str) -> LoggedModel | None:
    """Return the MLflow model of the checkpoint with this digest, or None if no such checkpoint was logged."""
    experiments = [each.experiment_id for each in client().search_experiments()]
    models = client().search_logged_models(
        experiments, filter_string=f"tags.`checkpoint.digest` = '{digest}'", max_results=1
    )
    return models[0] if models else None


def open_run(experiment: str, name: str, tags: Mapping[str, str], parent: TrackedRun | None = None) -> TrackedRun:
    """Start an MLflow run called `name`, in the experiment called `experiment`.

    If `parent` is given, the run is nested under it and belongs to the parent's experiment.
    """
    where = parent.experiment if parent else experiment_id(experiment)
    more = {names.PARENT_TAG: parent.run_id} if parent else {names.COMMIT_TAG: installed_commit()}
    more |= {"mlflow.user": user_name(), "mlflow.source.name": "armature", "mlflow.source.type": "LOCAL"}
    run = client().create_run(where, run_name=name, tags={**tags, **more})
    return TrackedRun(run.info.run_id, where)


@contextmanager
def tracked(
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    sections: Mapping[str, BaseModel],
    parent: TrackedRun | None = None,
) -> Iterator[TrackedRun]:
    """Open an MLflow run with settings as its parameters, and close it as FINISHED, KILLED (interrupted) or FAILED.

    Raises:
        TrackingError: MLflow does not answer. If the block itself failed, its error is raised with a note about MLflow.
    """
    values = {key: section.model_dump(mode="json") for key, section in sections.items()}
    hashed = {key: value for key, value in values.items() if key != "machine"}
    with patience(_FIRST_SECONDS) if parent is None else nullcontext():
        run = open_run(experiment, name, {**tags, names.CONFIG_TAG: document_digest(hashed)}, parent)
    try:
        run.log_params(values)
        yield run
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            with patience(0.0):
                run.close("KILLED" if killed else "FAILED")
        except TrackingError as lost:
            error.add_note(f"MLflow does not know that the run ended: {lost.what}")
        raise
    run.close()
