"""Numbers of an artifact in MLflow: each has a name of its own, whatever users call their kinds and reward parts."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param_name

from armature.components.contracts.episodes import Task
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact
from armature.components.evaluation.results import collect_results, metrics
from armature.tasks.reports import CheckpointResult, _final_numbers, numbers
from armature.tasks.tracking import flatten
from tests.contracts.test_metric_names import HOSTILE
from tests.pages.conftest import make_trajectory

KINDS = ["mean", "overall", "accuracy", "kinds", "reward_parts/x", *HOSTILE]


def evaluation(folder: Path, kinds: list[str]) -> Artifact:
    tasks = [Task(f"colors/t{n}", "heldout", {"kind": kind}) for n, kind in enumerate(kinds)]
    played = GenerateOutputs([make_trajectory(f"t{n}") for n in range(len(kinds))])
    folder.mkdir(parents=True, exist_ok=True)
    measured = metrics(collect_results(played, tasks, 1.0, "kind"), ["heldout"])
    measured["reward_parts"] = {kind: float(number) for number, kind in enumerate(kinds)}
    (folder / "metrics.json").write_text(json.dumps(measured))
    return Artifact(kind="evaluate", path=folder, digest="digest")


@settings(max_examples=25)
@given(kinds=st.lists(st.sampled_from(KINDS), unique=True, min_size=1))
def test_metric_names_of_kinds_and_parts_do_not_collide(tmp_path_factory, kinds):
    result = numbers(evaluation(tmp_path_factory.mktemp("evaluation"), kinds))
    assert sorted(value for name, value in result.items() if name.startswith("reward_parts/")) == list(
        range(len(kinds))
    )
    assert sum(name.startswith("kinds/") and name.endswith("/episodes") for name in result) == len(kinds)
    assert result["accuracy"] == 1.0 and result["episodes"] == len(kinds)
    for name in result:
        _validate_metric_name(name)


def test_any_settings_key_becomes_an_mlflow_parameter():
    values = {"environment": {"args": {"columns": dict.fromkeys(KINDS, "x")}, "name": "colors"}}
    result = flatten(values)
    assert len(result) == len(KINDS) + 1 and result["environment.name"] == "colors"
    assert result["environment.args.columns.mean"] == "x"
    for name in result:
        _validate_param_name(name)


def test_similar_checkpoint_names_keep_separate_metrics(tmp_path):
    named = ["runs/a", "runs_a", "runs:a"]
    findings = [CheckpointResult(name, evaluation(tmp_path / str(n), ["all"])) for n, name in enumerate(named)]
    result = _final_numbers(findings, {})
    assert sum(name.endswith("/accuracy") and name.count("/") == 1 for name in result) == len(named)
    for name in result:
        _validate_metric_name(name)
