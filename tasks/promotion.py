"""The registered model of a deployment: its files, and which of its versions is the candidate."""

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
    known = client().search_model_versions(f"name = '{name}'")
    source = f"models:/{model.model_id}"
    version = next((each.version for each in known if each.source == source or each.model_id == model.model_id), None)
    if version is None:
        _give_files(model, checkpoint.path / CHECKPOINT)
        version = patiently(names.shown_uri(), mlflow.register_model)(source, name).version
    client().set_registered_model_alias(name, "candidate", version)
    return f"models:/{name}@candidate"


def _give_files(model: LoggedModel, folder: Path) -> None:
    """The checkpoint's files, where MLflow has those of the model: hard links on the store's disk, else copies.

    The address that has them is MLflow's choice: a folder of this machine, or a bucket, to which they are sent.

    Raises:
        TrackingError: they cannot be put there.
    """
    place = urlparse(str(model.artifact_location))
    if place.scheme not in ("", "file"):
        client().log_model_artifacts(model.model_id, str(folder))
        return
    try:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            target = Path(unquote(place.path)) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # of an attempt that was stopped
            link_file(file, target)
    except OSError as error:
        raise TrackingError(
            f"the checkpoint's files cannot be put where MLflow keeps them: {error.strerror}",
            code="checkpoint_not_published",
            where=place.path,
            remedy="free its disk, or make it writable, then run again: what was made is kept",
        ) from error


def _model_name(text: str) -> str:
    """The text without the characters that MLflow refuses in the name of a model, or reads in addresses and filters."""
    return re.sub(r"[^\w .-]", ".", text)


def measure_of_candidate(registered_name: str, model: LoggedModel, key: str) -> float | None:
    """The number `key` of the model that the alias "candidate" points at.

    None if there is none, if that is `model`, or if it was not measured as `model` was last: on the same tasks, by an
    evaluation of the same settings.
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
