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
    """Register a logged model in MLflow and point the alias "candidate" at it.

    The files of `checkpoint` are put where MLflow keeps the model's files. The result is "models:/<name>@candidate".
    """
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
    """Put the files in the checkpoint's folder where MLflow keeps the files of the model.

    MLflow chooses the place. If it is a folder on the store's disk, hard links are made; in a folder on another disk,
    copies. If it is a bucket, the files are uploaded.

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
    """Return a text that can be the name of a registered model.

    Characters that MLflow refuses, or that have a meaning in its addresses and filters, are replaced by dots.
    """
    return re.sub(r"[^\w .-]", ".", text)


def measure_of_candidate(registered_name: str, model: LoggedModel, key: str) -> float | None:
    """Return the value of the metric `key` for the current candidate, to compare it with `model`.

    The candidate is the model that the alias "candidate" points at. The result is None if there is no candidate, if the
    candidate is `model` itself, or if it was not evaluated on the same tasks and with the same settings as `model`.
    """
    try:
        version = client().get_model_version_by_alias(_model_name(registered_name), "candidate")
    except MlflowException:
        return None
    candidate = client().get_logged_model(str(version.source).rpartition("/")[2])
    if candidate.model_id == model.model_id:
        return None

    def measured(one: LoggedModel) -> list[tuple[tuple[str | None, str | None], float]]:
        """Return the measured values of the metric, the newest last.

        Each value is in a pair with the digests of the tasks and of the settings of its evaluation.
        """
        metrics = [metric for metric in client().get_logged_model(one.model_id).metrics or () if metric.key == key]
        metrics.sort(key=lambda metric: metric.timestamp)
        tags = [client().get_run(str(metric.run_id)).data.tags for metric in metrics]
        pairs = zip(metrics, tags, strict=True)
        return [((metric.dataset_digest, tag.get(names.CONFIG_TAG)), metric.value) for metric, tag in pairs]

    how, _ = measured(model)[-1]
    return dict(measured(candidate)).get(how)
