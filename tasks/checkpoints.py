"""Names that people give to checkpoints, and the artifacts behind them."""

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
    """The artifact of a folder, a digest, an MLflow alias, a hub name or tiny/<family>, as its field describes.

    Raises:
        DataError: the alias is unknown, or its checkpoint is not where it was.
    """
    if name.startswith(ALIAS_PREFIX):
        return aliased_artifact(name, machine)
    if (project_path(name) / "manifest.json").is_file():
        return open_artifact(project_path(name))
    if found := open_store(machine).find_digest(name):
        return found
    settings = ModelSettings.model_validate(model.model_dump() | _source(name, model))
    return run_with("model", settings, machine)


def _source(name: str, model: ModelSettings) -> dict[str, object]:
    """A hub name in place of tiny/<family> has no tiny sizes."""
    return {"source": name} if name.startswith("tiny/") else {"source": name, "tiny": None}


def aliased_artifact(name: str, machine: Machine) -> Artifact:
    """The artifact of `models:/<name>@<alias>` or `models:/<name>/<version>`: where it was made, or of this store."""
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
    if folder.is_dir() and (there := open_artifact(folder)).digest == digest:
        return there
    store = open_store(machine)
    found = store.find_digest(digest) or store.find(folder.parent.name, folder.name)
    if found is None or found.digest != digest:
        raise DataError(
            f"the checkpoint of {name!r} is not on this machine, or gone",
            code="checkpoint_not_here",
            where=f"{folder}, digest {digest}; machine.store = {machine.store}, "
            f"machine.remote_store = {machine.remote_store}",
            remedy="name the store that has it: --machine store=... or remote_store=...; or take the files that MLflow "
            f"keeps of it, and name their folder: mlflow artifacts download -u {name} -d FOLDER; or run its training "
            "again",
        )
    return found
