"""Register a deployment's checkpoint as an MLflow model and point the alias "candidate" at it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlparse

import mlflow
from mlflow.entities import LoggedModel
from mlflow.exceptions import MlflowException

from armature.components.artifacts.disk import link_file
from armature.components.contracts.errors import TrackingError
from armature.components.contracts.stages import Artifact
from armature.components.models.source import CHECKPOINT
from armature.tasks import mlflow_client as names
from armature.tasks.mlflow_client import client
from armature.tasks.patience import patiently


def promote(model: LoggedModel, registered_name: str, checkpoint: Artifact) -> str:
    """Register the model with its files and point the alias "candidate" at it; returns "models:/<name>@candidate"."""
    name = _model_name(registered_name)
    versions = client().search_model_versions(f"name = '{name}'")
    source = f"models:/{model.model_id}"
    version = next(
        (each.version for each in versions if each.source == source or each.model_id == model.model_id), None
    )
    if version is None:
        _give_files(model, checkpoint.path / CHECKPOINT)
        version = patiently(names.shown_uri(), mlflow.register_model)(source, name).version
    client().set_registered_model_alias(name, "candidate", version)
    return f"models:/{name}@candidate"


def _give_files(model: LoggedModel, folder: Path) -> None:
    """Copy the checkpoint's files to the place where MLflow keeps the files of the model.

    MLflow chooses the place. Files for a local folder are hard-linked if the folder is on the store's disk, and copied
    otherwise. Files for a bucket are uploaded.

    Raises:
        TrackingError: the files cannot be written there.
    """
    place = urlparse(str(model.artifact_location))
    if place.scheme not in ("", "file"):
        client().log_model_artifacts(model.model_id, str(folder))
        return
    try:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            target = Path(unquote(place.path)) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # an interrupted attempt may have left it
            link_file(file, target)
    except OSError as error:
        raise TrackingError(
            f"the checkpoint's files cannot be written to MLflow's folder: {error.strerror}",
            code="checkpoint_not_published",
            where=place.path,
            remedy="free its disk or make it writable, then run again: finished artifacts are kept",
        ) from error


def _model_name(text: str) -> str:
    """Replace the characters that MLflow refuses in a model's name, or that have a meaning in addresses and filters."""
    return re.sub(r"[^\w .-]", ".", text)


def measure_of_candidate(registered_name: str, model: LoggedModel, key: str) -> float | None:
    """Return the metric `key` of the model that the alias "candidate" points at.

    Returns None if there is no candidate, if the candidate is `model` itself, or if the two were not evaluated on the
    same tasks with the same settings.
    """
    try:
        version = client().get_model_version_by_alias(_model_name(registered_name), "candidate")
    except MlflowException:
        return None
    candidate = client().get_logged_model(str(version.source).rpartition("/")[2])
    if candidate.model_id == model.model_id:
        return None

    def measured(one: LoggedModel) -> list[tuple[tuple[str | None, str | None], float]]:
        """Each by its tasks and settings, the newest last."""
        metrics = [metric for metric in client().get_logged_model(one.model_id).metrics or () if metric.key == key]
        metrics.sort(key=lambda metric: metric.timestamp)
        tags = [client().get_run(str(metric.run_id)).data.tags for metric in metrics]
        pairs = zip(metrics, tags, strict=True)
        return [((metric.dataset_digest, tag.get(names.CONFIG_TAG)), metric.value) for metric, tag in pairs]

    how, _ = measured(model)[-1]
    return dict(measured(candidate)).get(how)
