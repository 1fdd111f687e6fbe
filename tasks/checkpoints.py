"""Find the artifact of a checkpoint by the name that a user typed."""

from __future__ import annotations

from pathlib import Path

from mlflow.exceptions import MlflowException

from armature.components.artifacts.manifest import open_artifact
from armature.components.configuration.stages import open_store
from armature.components.contracts.errors import DataError
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.machine.project import project_path
from armature.components.models.settings import ModelSettings
from armature.tasks.mlflow_client import client
from armature.tasks.run_stage import run_with

ALIAS_PREFIX = "models:/"


def checkpoint_artifact(name: str, model: ModelSettings, machine: Machine) -> Artifact:
    """Return the artifact of a checkpoint.

    Args:
        name: a folder, an artifact's digest, an MLflow model ("models:/NAME@ALIAS" or "models:/NAME/VERSION"), a hub
            name, or "tiny/FAMILY".
        model: settings for a hub name or a tiny checkpoint.

    Raises:
        DataError: MLflow does not know the model, or its checkpoint is not on this machine.
    """
    if name.startswith(ALIAS_PREFIX):
        return aliased_artifact(name, machine)
    if (project_path(name) / "manifest.json").is_file():
        return open_artifact(project_path(name))
    if artifact := open_store(machine).find_digest(name):
        return artifact
    settings = ModelSettings.model_validate(model.model_dump() | _source(name, model))
    return run_with("model", settings, machine)


def _source(name: str, model: ModelSettings) -> dict[str, object]:
    """Return the fields of `ModelSettings` that select the model `name`.

    For a hub name, the sizes of a tiny model are removed.
    """
    return {"source": name} if name.startswith("tiny/") else {"source": name, "tiny": None}


def aliased_artifact(name: str, machine: Machine) -> Artifact:
    """Return the artifact of `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    MLflow records the folder in which the checkpoint was made. If that folder is gone, this machine's store is
    searched.
    """
    body = name.removeprefix(ALIAS_PREFIX)
    registered, _, alias = body.partition("@")
    try:
        if alias:
            version = client().get_model_version_by_alias(registered, alias)
        else:
            registered, _, number = body.rpartition("/")
            version = client().get_model_version(registered, number)
    except MlflowException as error:
        raise DataError(
            f"MLflow has no model {name!r}",
            code="unknown_model",
            where=str(error),
            remedy="train first (a training run registers its checkpoint), or name a folder or a digest",
        ) from error
    tags = client().get_logged_model(str(version.source).rpartition("/")[2]).tags
    folder, digest = Path(tags["checkpoint.uri"]), tags["checkpoint.digest"]
    if folder.is_dir() and (recorded := open_artifact(folder)).digest == digest:
        return recorded
    store = open_store(machine)
    artifact = store.find_digest(digest) or store.find(folder.parent.name, folder.name)
    if artifact is None or artifact.digest != digest:
        raise DataError(
            f"the checkpoint of {name!r} is not on this machine, or was deleted",
            code="checkpoint_not_here",
            where=f"{folder}, digest {digest}; machine.store = {machine.store}, "
            f"machine.remote_store = {machine.remote_store}",
            remedy="name the store that has it (--machine store=... or remote_store=...), or download the files that "
            f"MLflow keeps (mlflow artifacts download -u {name} -d FOLDER) and name that folder, or train again",
        )
    return artifact
