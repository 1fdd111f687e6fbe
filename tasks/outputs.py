"""What a stage wrote, made visible in MLflow: numbers, histories, pages, lineage and checkpoints, by their file names.

The same for a reused artifact as for a new one, so that every flow run's record is whole; and after a resume it
fills in the steps that an earlier process reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModel

from armature.components.artifacts.manifest import read_manifest
from armature.components.configuration.stages import open_store
from armature.components.contracts.machine import Machine
from armature.components.contracts.metrics import metric_part, metrics_below
from armature.components.contracts.stages import Artifact
from armature.tasks.tracking import TrackedRun

MODEL_KINDS = ("model", "policy")
"""Kinds of artifacts that are checkpoints, and names of the inputs that take one."""
PAGE_SUFFIXES = (".html", ".png", ".svg")
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Numbers that are strings in JSON."""
TABLES = ("metrics.json", "history.json", "lineage.json")
MAX_PAGE_BYTES = 64 * 2**20


def record_output(
    run: TrackedRun, artifact: Artifact, inputs: Mapping[str, Artifact], machine: Machine, reported: set[str | int]
) -> None:
    """`reported`: digests and steps that the stage has reported itself.

    A number of the whole run that is called like a curve is `final/` and its name: at step 0 it would bend the curve.
    """
    model = _models(run, artifact, inputs)
    manifest = read_manifest(artifact.path)
    run.log_numbers(metrics_below("rows", manifest.rows) | metrics_below("drops", manifest.drops))
    rows = _history(artifact.path / "history.json")
    curves = set().union(*rows)
    whole = {f"final/{key}" if key in curves else key: value for key, value in numbers(artifact).items()}
    run.log_numbers(whole, model, inputs.get("tasks"))
    now = int(time.time() * 1000)
    later = [(int(row["step"]), row) for row in rows if int(row["step"]) not in reported]
    run.log_metrics([(key, float(row[key]), now, step) for step, row in later for key in row if key != "step"])
    run.log_artifacts(_lineage(artifact.path / "lineage.json", machine, reported))
    for page in pages(artifact):
        run.log_file(page)


def numbers(artifact: Artifact) -> dict[str, float]:
    """The numbers of the artifact's `metrics.json`, nested ones under names joined by slashes.

    Names of kinds and reward parts are as users chose them: they become parts of a metric's name here.
    """
    path = artifact.path / "metrics.json"
    return _flat_numbers(json.loads(path.read_text())) if path.is_file() else {}


def pages(artifact: Artifact) -> list[Path]:
    """Pages, images and small tables for people."""
    files = sorted(artifact.path.iterdir())
    shown = [path for path in files if path.suffix in PAGE_SUFFIXES or path.name in TABLES]
    return [path for path in shown if path.stat().st_size <= MAX_PAGE_BYTES]


def _models(run: TrackedRun, artifact: Artifact, inputs: Mapping[str, Artifact]) -> LoggedModel | None:
    """The checkpoint that the stage wrote; else the one that it used."""
    given = [inputs[name] for name in MODEL_KINDS if name in inputs]
    used = run.log_model("checkpoint", given[0], "input") if given else None
    if artifact.kind in MODEL_KINDS or (artifact.path / "checkpoint").is_dir():
        return run.log_model(artifact.kind, artifact, "output")
    return used


def _flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        key = "/".join(map(metric_part, name.split("/")))
        if isinstance(value, Mapping):
            flat.update(_flat_numbers(value, f"{prefix}{key}/"))
        elif (isinstance(value, int | float) and not isinstance(value, bool)) or value in NOT_FINITE:
            flat[f"{prefix}{key}"] = float(value)
    return flat


def _history(path: Path) -> list[dict[str, Any]]:
    """Numbers by step, which are curves."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return rows


def _lineage(path: Path, machine: Machine, reported: set[str | int]) -> list[tuple[Artifact, str, int | None]]:
    if not path.is_file():
        return []
    steps = [
        (digest, int(row["step"]))
        for row in json.loads(path.read_text())
        for key, digest in row.items()
        if key != "step" and digest not in reported
    ]
    if not steps:
        return []
    known = {each.digest: each for each in open_store(machine)}
    return [(known[digest], "output", step) for digest, step in steps if digest in known]
