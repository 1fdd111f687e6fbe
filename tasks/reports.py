"""Publish the output of a stage: metrics, pages and lineage to MLflow, a table of results and links to Prefect's
page."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModel
from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import State

from armature.components.artifacts.disk import write_file
from armature.components.artifacts.manifest import read_manifest
from armature.components.configuration.stages import open_store
from armature.components.contracts.installation import home_folder
from armature.components.contracts.machine import Machine
from armature.components.contracts.metrics import metric_part, metrics_below
from armature.components.contracts.stages import Artifact
from armature.components.evaluation.wilson import Interval
from armature.components.models.source import CHECKPOINT
from armature.components.pages.training import REPORT_FILE, with_figures
from armature.components.viewer.address import viewer_address
from armature.tasks.flow_run import deployment_name, provenance
from armature.tasks.mlflow_client import where_served
from armature.tasks.promotion import measure_of_candidate, promote
from armature.tasks.tracking import TrackedRun, find_model

MODEL_KINDS = ("model", "policy")
"""Kinds of artifacts that are a checkpoint. They are also the names of the stage inputs that are a checkpoint."""
PAGE_SUFFIXES = (".html", ".png", ".svg")
"""File name suffixes of an artifact's pages and images, which MLflow shows."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Strings that stand for numbers that are not finite in `metrics.json`."""
TABLES = ("metrics.json", "history.json", "lineage.json")
"""Names of an artifact's JSON files, which MLflow shows."""
MAX_PAGE_BYTES = 64 * 2**20
"""Size in bytes above which a file is not sent to MLflow."""


def record_output(
    run: TrackedRun, artifact: Artifact, inputs: Mapping[str, Artifact], machine: Machine, reported: set[str | int]
) -> None:
    """Log a stage's artifact in MLflow: its metrics, curves, lineage, checkpoint and pages.

    A metric of the whole run that has the same name as a curve is logged as `final/NAME`. Under its own name it would
    be a point of the curve at step 0.

    Args:
        reported: digests and steps that the stage has reported while it ran; they are not logged again.
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
    """Return the numbers of the artifact's `metrics.json`. The keys of nested tables are joined by slashes.

    Users choose the names of kinds and reward parts, so characters that MLflow refuses in a metric's name are replaced.
    """
    path = artifact.path / "metrics.json"
    return _flat_numbers(json.loads(path.read_text())) if path.is_file() else {}


def pages(artifact: Artifact) -> list[Path]:
    """Return the artifact's HTML pages, images and small JSON tables, which MLflow shows."""
    files = sorted(artifact.path.iterdir())
    shown = [path for path in files if path.suffix in PAGE_SUFFIXES or path.name in TABLES]
    return [path for path in shown if path.stat().st_size <= MAX_PAGE_BYTES]


def _models(run: TrackedRun, artifact: Artifact, inputs: Mapping[str, Artifact]) -> LoggedModel | None:
    """Log the checkpoints that a stage used and wrote as MLflow models.

    Return the model of the checkpoint that the stage wrote, or else of the one that it used, or None.
    """
    checkpoints = [inputs[name] for name in MODEL_KINDS if name in inputs]
    used = run.log_model("checkpoint", checkpoints[0], "input") if checkpoints else None
    if artifact.kind in MODEL_KINDS or (artifact.path / "checkpoint").is_dir():
        return run.log_model(artifact.kind, artifact, "output")
    return used


def _flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested tables by their path of keys, joined by slashes; other values are left out."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        key = "/".join(map(metric_part, name.split("/")))
        if isinstance(value, Mapping):
            flat.update(_flat_numbers(value, f"{prefix}{key}/"))
        elif (isinstance(value, int | float) and not isinstance(value, bool)) or value in NOT_FINITE:
            flat[f"{prefix}{key}"] = float(value)
    return flat


def _history(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the file `history.json`, each with the metrics of one step; none if there is no such file."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return rows


def _lineage(path: Path, machine: Machine, reported: set[str | int]) -> list[tuple[Artifact, str, int | None]]:
    """Return artifact, role and step of each artifact of a step that the file `lineage.json` names.

    Artifacts that are in `reported`, or not in the store, are left out.
    """
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
    artifacts = {each.digest: each for each in open_store(machine)}
    return [(artifacts[digest], "output", step) for digest, step in steps if digest in artifacts]


def link_viewer(label: str, fingerprint: str, store: Path) -> None:
    """Write on Prefect's page how to view the stage called `label`, with a link if a viewer of `store` is running.

    The link contains no token, because every user of the Prefect server can read it. The viewer asks for the token.
    """
    command = f"armature view --store {shlex.quote(str(store))}"
    text = f"`{command}` shows the curves and every rollout of **{label}**, also while it runs."
    if (address := viewer_address(store)) is not None:
        link = f"[Curves and rollouts of **{label}**]({address}?run={fingerprint[:12]})"
        text = f"{link}\n\nThe page asks once for the token that `armature view` printed. After it ended: {text}"
    key = re.sub("[^a-z0-9]+", "-", f"rollouts {label}".lower()).strip("-")
    create_markdown_artifact(f"{text}\n", key=key)


SHOWN = (
    *("accuracy", "accuracy_low", "accuracy_high", "success", "success_low", "success_high"),
    *("reward", "episodes", "failed", "action_error", "mean_action_error"),
    *("heldout_loss_before", "heldout_loss", "heldout_token_accuracy_before", "heldout_token_accuracy"),
    *("heldout_chosen_likelier_before", "heldout_chosen_likelier", "heldout_pair_accuracy"),
)
"""Names of the metrics in the table of results. Metrics of a second split are called SPLIT/NAME there. MLflow has all
metrics."""


ACTION_ERROR, MEAN_ACTION = "action_error", "mean_action_error"
"""Names of the errors on held-out episodes of a trained robot policy, and of always predicting the mean action."""
MEASURES = ("accuracy", "success")
"""Names of the metrics by which checkpoints are compared. The first of these that an evaluation has is used."""


@dataclass(frozen=True)
class CheckpointResult:
    """A checkpoint with the artifact of its evaluation, or with the error that prevented the evaluation."""

    name: str
    artifact: Artifact | None
    error: str = ""

    @classmethod
    def of(cls, name: str, state: State[Artifact]) -> CheckpointResult:
        """Return the result of a task run that made an evaluation, or has failed."""
        return cls(name, state.result()) if state.is_completed() else cls(name, None, str(state.message))

    def row(self) -> dict[str, str | float]:
        """Return the checkpoint's row in the table of results, by column."""
        values = numbers(self.artifact) if self.artifact else {}
        columns = [*SHOWN, *(f"{split}/{key}" for split in ("heldout", "train") for key in SHOWN)]
        shown = {key: round(values[key], 4) for key in columns if key in values}
        digest = {"digest": self.artifact.digest[:12]} if self.artifact else {"error": self.error.splitlines()[0]}
        reused = {"reused": "yes"} if self.artifact and self.artifact.path.name in provenance().reused else {}
        return {"checkpoint": self.name, **shown, **reused, **digest}


@task(name="report", task_run_name="report", cache_policy=NO_CACHE, persist_result=False)
def report(
    tracking: TrackedRun, findings: Sequence[CheckpointResult], made: Mapping[str, Artifact], promoted: str = ""
) -> list[str]:
    """Write the table of results and the links to Prefect's page, and return the summary for the terminal as lines."""
    tracking.log_numbers(_final_numbers(findings, made))
    rows = [finding.row() for finding in findings]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    create_table_artifact([{key: row.get(key, "") for key in columns} for row in rows], key="results")
    create_link_artifact(tracking.page, link_text="The run in MLflow", key="mlflow")
    lines = []
    for finding in findings:
        shown = "  ".join(f"{key}={value}" for key, value in finding.row().items() if key != "checkpoint")
        lines.append(f"{finding.name:<16} {shown}")
    evaluated = {finding.name: finding.artifact for finding in findings if finding.artifact}
    for name, artifact in {**made, **evaluated}.items():
        lines += [f"{name:<16} {page.resolve().as_uri()}" for page in pages(artifact) if page.suffix == ".html"]
        lines.append(f"{name:<16} {artifact.digest}  {artifact.path}")
    candidate = [f"{'candidate':<16} {promoted}"] if promoted else []
    text = "\n".join(f"- `{line}`" for line in [*lines, *candidate])
    create_markdown_artifact(f"[The run in MLflow]({tracking.page})\n\n{text}\n", key="summary")
    trackers = [f"{tracker:<16} {place}" for place, tracker in provenance().trackers.items()]
    return [
        *lines,
        *trackers,
        f"{'MLflow':<16} {where_served(tracking.run_id, tracking.experiment)}",
        *candidate,
        *_last_lines(findings, made),
    ]


def _last_lines(findings: Sequence[CheckpointResult], made: Mapping[str, Artifact]) -> list[str]:
    """Return the lines that a run of a training ends with: what was measured before and after, and the files' paths.

    For a robot policy, the error of actions on held-out episodes is measured. The report is a copy of the training's
    `report.html` with these numbers, in `.armature/reports`. A later run of the recipe replaces it.
    """
    figures = {}
    rates = [rate for finding in findings if finding.artifact and (rate := rate_of(finding.artifact))]
    if len(rates) > 1 and "training" in made:
        (measure, before), (_, after) = rates[0], rates[-1]
        figures = {measure: f"{before} → {after}"}
    if "training" in made and ACTION_ERROR in (values := numbers(made["training"])):
        names = (f"{ACTION_ERROR}_before", ACTION_ERROR, MEAN_ACTION)
        first, last, constant = (f"{values[name]:.4g}" for name in names)
        figures[ACTION_ERROR] = f"{first} → {last}, {constant} of the mean action"
    lines = [f"{measure:<16} {change}" for measure, change in figures.items()]
    if (training := made.get("training")) is None or not (training.path / REPORT_FILE).is_file():
        return lines
    page = (training.path / REPORT_FILE).read_text("utf-8")
    name = f"{flow_run.flow_name}-{deployment_name()}.html".replace("/", "-")
    report = home_folder().resolve() / ".armature/reports" / name
    report.parent.mkdir(parents=True, exist_ok=True)
    shown = {f"held-out {measure}, before and after": change for measure, change in figures.items()}
    write_file(report, with_figures(page, shown).encode())
    files = {"model": training.path / CHECKPOINT, "report": report, "history": training.path / "history.json"}
    return lines + [f"{name:<16} {path}" for name, path in files.items() if path.exists()]


def rate_of(evaluation: Artifact) -> tuple[str, Interval] | None:
    """Return the name of the rate that an evaluation measured and its value with the interval; None without a rate."""
    values = numbers(evaluation)
    for measure in MEASURES:
        if measure in values:
            low, high = (values.get(f"{measure}_{limit}", nan) for limit in ("low", "high"))
            return measure, Interval(values[measure], low, high, values.get("episodes", nan))
    return None


def _final_numbers(findings: Sequence[CheckpointResult], made: Mapping[str, Artifact]) -> dict[str, float]:
    """Return the metrics that are logged in the flow's own MLflow run.

    They are called RESULT/METRIC, or METRIC if the flow has only one result.
    """
    results = {finding.name: finding.artifact for finding in findings if finding.artifact}
    if len(findings) == 1 and results:
        return numbers(*results.values())
    named = {metric_part(name): numbers(artifact) for name, artifact in {**made, **results}.items()}
    return {f"{name}/{key}": value for name, values in named.items() for key, value in values.items()}


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, persist_result=False)
def promote_candidate(checkpoint: Artifact, registered_name: str, findings: Sequence[CheckpointResult]) -> str:
    """Point `models:/NAME@candidate` at the checkpoint, unless another checkpoint was evaluated as better.

    A robot policy has to be at least as good as always predicting the mean action, if held-out episodes measured both.
    The checkpoint is also compared with the other findings (the model before training) and with the current candidate,
    if that was evaluated on the same tasks with the same settings.

    Args:
        checkpoint: the trained checkpoint.
        registered_name: name of the registered model.
        findings: evaluations; the last one is the checkpoint's own. If there are none, nothing is compared.

    Returns:
        "models:/NAME@candidate", or a sentence that says why the alias was not moved.
    """
    model = find_model(checkpoint.digest)
    assert model is not None, "the stage that made a checkpoint logs it"
    errors = numbers(checkpoint)
    if ACTION_ERROR in errors and not errors[ACTION_ERROR] <= errors[MEAN_ACTION]:  # nor if it is NaN
        error, constant = (f"{errors[key]:.4g}" for key in (ACTION_ERROR, MEAN_ACTION))
        return f"stays where it is: {ACTION_ERROR} {error} after training, {constant} of the mean action"
    if not findings:
        return promote(model, registered_name, checkpoint)
    *others, own = [(finding.name, numbers(finding.artifact)) for finding in findings if finding.artifact]
    measure = next(key for key in MEASURES if key in own[1])
    values = {name: values[measure] for name, values in others}
    if (promoted := measure_of_candidate(registered_name, model, measure)) is not None:
        values["the candidate"] = promoted
    better = [f"{value:.4g} {name}" for name, value in values.items() if value > own[1][measure]]
    if better:
        return f"stays where it is: {measure} {own[1][measure]:.4g} {own[0]}, {' and '.join(better)}"
    return promote(model, registered_name, checkpoint)
