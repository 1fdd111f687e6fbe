"""`armature stage`: run one stage without Prefect. DVC's pipeline calls it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from armature.components.artifacts.disk import link_folder
from armature.components.artifacts.manifest import open_artifact
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, refuse_unknown, run_stage
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.metrics import write_json
from armature.components.contracts.stages import Artifact, Stage
from armature.components.machine.project import project

METRICS = (
    *("accuracy", "accuracy_low", "accuracy_high", "reward", "failed", "entropy", "mismatch_kl_max", "best/accuracy"),
    *("tasks/with_signal", "success", "success_low", "success_high", "heldout_loss", "action_error"),
)
"""Metrics that `--metrics` writes, which `dvc metrics diff` then shows; the artifact has all."""


def parse_inputs(pairs: Sequence[str]) -> dict[str, Artifact]:
    """Parse `name=folder` pairs and return the artifacts in the folders, by name.

    Each artifact is checked against its manifest.
    """
    inputs = {}
    for pair in pairs:
        name, separator, folder = pair.partition("=")
        if not separator or not name or not folder:
            raise ConfigurationError(
                f"not an input: {pair!r}", code="invalid_stage_input", remedy="write --input NAME=FOLDER"
            )
        if name in inputs:
            raise ConfigurationError(
                f"input {name!r} is given twice", code="invalid_stage_input", remedy="write each input once"
            )
        inputs[name] = open_artifact(Path(folder))
    return inputs


def run_one_stage(
    name: str,
    config: Path,
    inputs: Sequence[str],
    out: Path | None,
    overrides: Sequence[str],
    metrics: Path | None = None,
) -> Artifact:
    """Run stage `name` with its sections of the recipe file `config`, and return the artifact.

    `inputs` are `name=folder` pairs. If `out` is given, hard links to the artifact's files are made in that folder.
    If `metrics` is given, the artifact's `METRICS` are written to that file.
    """
    recipe = load_recipe(config, overrides)
    stage: Stage = STAGES[name]
    machine = recipe.machine
    refuse_unknown(machine.force)
    again = name in machine.force
    with project(recipe.folder):
        settings, artifacts = recipe.settings_for(stage.settings), parse_inputs(inputs)
        tracked_as = recipe.flow, f"{recipe.name.split('/')[-1]} {name}"
        artifact = run_stage(name, settings, artifacts, machine, again=again, tracked_as=tracked_as, recipe=recipe.name)
    if out is not None:
        link_folder(artifact.path, out)
    if metrics is not None:
        values = json.loads((artifact.path / "metrics.json").read_bytes())
        write_json(metrics, {key: values[key] for key in METRICS if key in values})
    return artifact
