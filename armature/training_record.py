"""What is known of a checkpoint: how it was made and from what, and how it did, as the artifacts say it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from armature.components.artifacts.manifest import MANIFEST, Manifest, open_artifact, read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import merge, settings_in
from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.stages import Artifact
from armature.components.models.source import REFERENCE, SourceReference
from armature.components.recipes import RECIPES
from armature.components.stages import STAGES

START = ("model", "policy")
"""Names of the input that a training begins with, and kinds of what nobody has trained."""
EVALUATIONS = ("evaluate", "evaluate-libero")
SECONDS = 5.0
"""How long MLflow is waited for."""


@dataclass(frozen=True)
class CheckpointEvaluation:
    """`before`: of what the training began with. `numbers`: of metrics.json."""

    before: bool
    digest: str
    settings: Mapping[str, Any]
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingRecord:
    """A checkpoint's artifact and those that it was made from, nearest first, as far as the store has them.

    `base`: the checkpoint of the first, None where it was made from a seed. `inputs`: by digest. `commit`: of the code,
    "" where MLflow does not know the run.
    """

    artifact: Artifact
    manifest: Manifest
    base: SourceReference | None
    inputs: Mapping[str, tuple[str, Manifest]] = field(default_factory=dict)
    evaluations: tuple[CheckpointEvaluation, ...] = ()
    commit: str = ""

    @property
    def flow(self) -> str:
        return self.manifest.kind if self.manifest.kind in ("train-vla", "train-vla-rl") else "train-vlm"

    @property
    def trained(self) -> bool:
        return self.manifest.kind not in START

    @property
    def adapter_stands_on_base(self) -> bool:
        """Whether the training began with the base itself, not with what another one had made of it."""
        begun = [manifest.kind for name, manifest in self.inputs.values() if name in START]
        return self.base is not None and begun == ["model"]

    def recipe(self) -> dict[str, Any]:
        """The sections of the recipe that made it, as far as they are known, with every value."""
        values: dict[str, Any] = {}
        fields = RECIPES[self.flow].model_fields
        for manifest in [self.manifest, *(manifest for _, manifest in self.inputs.values())]:  # these say commits
            values = merge(values, dict(_sections(manifest, self.flow)))
        for each in self.evaluations:
            for name in set(each.settings) & set(fields):
                later = getattr(next(settings_in(fields[name].annotation)), "AFTER_TRAINING", ())
                known = {key: value for key, value in (values.get(name) or {}).items() if key not in later}
                values[name] = merge(each.settings[name], known)
        return {name: values[name] for name in fields if values.get(name) is not None}


def read_record(source: Path, store: Path) -> TrainingRecord | None:
    """The record of an artifact's folder; None for a folder that is not one.

    Raises:
        DataError: its files are not as they were made.
    """
    if not (source / MANIFEST).is_file():
        return None
    artifact, manifest = open_artifact(source), read_manifest(source)
    known = {each.digest: each for each in ArtifactStore(store)} if store.is_dir() else {}
    inputs = {digest: (name, found) for name, digest, found in _inputs(manifest, known)}
    start = next((manifest.inputs[name] for name in START if name in manifest.inputs), None)
    return TrainingRecord(
        artifact,
        manifest,
        _base(source, manifest, inputs, known),
        inputs,
        tuple(_evaluations(manifest, {artifact.digest: False, start: True}, known.values())),
        _commit(artifact.digest),
    )


def _inputs(manifest: Manifest, known: Mapping[str, Artifact]) -> Iterator[tuple[str, str, Manifest]]:
    for name, digest in manifest.inputs.items():
        if digest in known:
            found = read_manifest(known[digest].path)
            yield name, digest, found
            yield from _inputs(found, known)


def _base(
    source: Path, manifest: Manifest, inputs: Mapping[str, tuple[str, Manifest]], known: Mapping[str, Artifact]
) -> SourceReference | None:
    kinds = {digest: found.kind for digest, (_, found) in inputs.items()}
    folders = [known[digest].path for digest, kind in kinds.items() if kind in START]
    for folder in [source, *folders] if manifest.kind in START else folders:
        if (folder / REFERENCE).is_file():
            return SourceReference.model_validate_json((folder / REFERENCE).read_text())
    return None


def _evaluations(
    manifest: Manifest, checkpoints: Mapping[str | None, bool], artifacts: Any
) -> Iterator[CheckpointEvaluation]:
    """On the tasks of the training, the ones before it first."""
    found = []
    for each in artifacts:
        if each.kind not in EVALUATIONS:
            continue
        made = read_manifest(each.path)
        played = next((made.inputs[name] for name in START if name in made.inputs), None)
        if played in checkpoints and made.inputs.get("tasks") == manifest.inputs.get("tasks"):
            numbers = json.loads((each.path / "metrics.json").read_text())
            found.append(CheckpointEvaluation(checkpoints[played], each.digest, made.settings, numbers))
    yield from sorted(found, key=lambda each: (not each.before, json.dumps(each.settings, sort_keys=True)))


def _sections(manifest: Manifest, flow: str) -> Iterator[tuple[str, Any]]:
    """The settings of a stage by the sections of its flow's recipes: one of them, or several under their names."""
    fields: dict[str, list[type[BaseModel]]] = {
        name: list(settings_in(each.annotation)) for name, each in RECIPES[flow].model_fields.items()
    }
    kind = STAGES[manifest.kind].settings
    own = next((name for name, classes in fields.items() if kind in classes), None)
    if own is not None:
        yield own, manifest.settings
    else:
        yield from ((name, part) for name, part in manifest.settings.items() if name in fields)


def _commit(digest: str) -> str:
    if "MLFLOW_TRACKING_URI" not in os.environ and not Path(".armature/mlflow.db").is_file():
        return ""
    from armature.tasks.lineage import code_commit
    from armature.tasks.patience import patience

    with suppress(ArmatureError), patience(SECONDS):
        return code_commit(digest)
    return ""
