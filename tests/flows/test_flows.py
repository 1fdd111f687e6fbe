"""Flows on a real Prefect API and a real MLflow."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import ParameterTypeError
from prefect.settings import get_current_settings
from pydantic import BaseModel, TypeAdapter

from armature.components.configuration import settings_in
from armature.components.configuration.recipes import RECIPES
from armature.components.robots.evaluation.sweep import PolicySweepSettings
from armature.components.viewer.address import announced
from armature.components.vlm.settings import WarmStartSettings
from armature.deployments import flow_of
from tests.refusals import refused
from tests.vlm.sft.test_warm_start import VALUES as WARM_START

pytestmark = pytest.mark.usefixtures("prefect_server", "tracking", "small_stages")


def artifacts_of(state) -> dict[str, str]:
    """Return the contents of the Prefect artifacts of a flow run, by key. `state` is the run's final state."""
    chosen = {"artifacts": {"flow_run_id": {"any_": [str(state.state_details.flow_run_id)]}}}
    answer = httpx.post(f"{get_current_settings().api.url}/artifacts/filter", json=chosen)
    return {each["key"]: each["data"] for each in answer.raise_for_status().json()}


@pytest.mark.parametrize("name", list(RECIPES))
def test_prefect_form_has_the_sections_of_the_recipe(name):
    flow, fields = flow_of(name), RECIPES[name].model_fields
    form = flow.parameters
    assert list(form.properties) == list(fields)
    described = flow.description.partition("Args:")[2].split("\n")
    assert [line.strip() for line in described if line] == [
        f"{key}: {each.description}" for key, each in fields.items()
    ]
    assert set(form.required) == set(fields) - RECIPES[name].optional() - {"machine"}
    annotations = {key: each.annotation for key, each in inspect.signature(flow.fn).parameters.items()}
    assert annotations == {key: each.annotation for key, each in fields.items()}


@pytest.mark.parametrize("name", list(RECIPES))
def test_prefect_form_shows_description_and_default_of_every_setting(name):
    """Against the settings classes themselves. What the server stores for a deployment: tests/platform/test_up.py."""
    form = flow_of(name).parameters
    existing: dict[str, type[BaseModel]] = {}

    def collect(model: type[BaseModel]) -> None:
        if model.__name__ not in existing:
            existing[model.__name__] = model
            for field in model.model_fields.values():
                for each in settings_in(field.annotation):
                    collect(each)

    collect(RECIPES[name])
    assert set(form.definitions) <= set(existing)
    for section, shown in form.properties.items():
        assert shown["title"] == section
        assert shown.get("description") or form.definitions[shown["$ref"].rpartition("/")[2]]["description"]
    for title, definition in form.definitions.items():
        fields = existing[title].model_fields
        assert list(definition["properties"]) == list(fields)
        for key, shown in definition["properties"].items():
            field = fields[key]
            assert shown["title"], (title, key)
            referred = form.definitions.get(shown.get("$ref", "").rpartition("/")[2], {})
            assert shown.get("description", referred.get("description")) == field.description
            if not field.is_required():
                default = TypeAdapter(Any).dump_python(field.get_default(call_default_factory=True), mode="json")
                assert shown["default"] == default, (title, key)


def test_training_ends_with_a_candidate_with_full_lineage(recipe):
    from armature.flows.train_vlm import train_vlm
    from armature.tasks.lineage import code_commit, lineage
    from armature.tasks.mlflow_client import client

    loaded = recipe("train-vlm/colors")
    store = Path(loaded.sections["machine"].store)
    store.mkdir()
    with announced(store, "http://127.0.0.1:8123/"):
        state = train_vlm(**loaded.sections, return_state=True)
    lines = state.result()
    assert any(line.startswith("MLflow") for line in lines)
    assert any("report.html" in line for line in lines)
    *_, rates, model, report, history = (line.split(maxsplit=1) for line in lines)
    assert [rates[0], model[0], report[0], history[0]] == ["accuracy", "model", "report", "history"]
    assert "→" in rates[1] and Path(report[1]).is_file() and Path(history[1]).is_file()
    shown = artifacts_of(state)
    assert {"results", "summary", "mlflow"} <= set(shown)
    (trained,) = (store / "train-vlm").glob("*/manifest.json")
    for stage in ("train-vlm", "evaluate-before-training", "evaluate-after-training"):
        assert "](http://127.0.0.1:8123/?run=" in shown[f"rollouts-{stage}"]
    assert f"?run={trained.parent.name[:12]})" in shown["rollouts-train-vlm"]
    assert [row["checkpoint"] for row in json.loads(shown["results"])] == ["before training", "after training"]

    version = client().get_model_version_by_alias("train-vlm.custom", "candidate")
    model = client().get_logged_model(version.source.rpartition("/")[2])
    (run,) = client().search_runs(["1"], "tags.`armature.stage` = 'train-vlm'")
    assert {point.step for point in client().get_metric_history(run.info.run_id, "reward")} == {1, 2, 3, 4}
    assert run.data.metrics["final/reward"] == 1.0  # the number of the run as a whole
    evaluations = client().search_runs(["1"], "tags.`armature.stage` = 'evaluate'")
    measured = {metric.run_id for metric in model.metrics if metric.key == "accuracy"}
    (after,) = [each for each in evaluations if each.info.run_id in measured]
    assert {run.info.run_name for run in evaluations} == {"evaluate before training", "evaluate after training"}
    (whole,) = client().search_runs(["1"], "tags.`armature.deployment` = 'custom'")
    assert whole.data.tags["mlflow.user"] and whole.data.tags["mlflow.source.name"] == "armature"
    assert {"before training/accuracy", "after training/accuracy", "training/reward"} <= set(whole.data.metrics)
    kinds = {node.name for node in lineage(after.info.run_id).walk()}
    assert {"evaluate after training", "train-vlm", "tasks", "model"} <= kinds
    digests = {node.digest for node in lineage(after.info.run_id).walk()}
    assert model.tags["checkpoint.digest"] in digests
    assert code_commit(model.tags["checkpoint.digest"]) == whole.data.tags["git.commit"] != ""
    assert code_commit("0" * 32) == ""


def test_unknown_kind_field_is_an_error_before_training(recipe):
    from armature.components.configuration.stages import open_store
    from armature.flows.train_vlm import train_vlm

    loaded = recipe("train-vlm/colors", "evaluation.kind_field=hue")
    state = train_vlm(**loaded.sections, return_state=True)
    assert "no field 'hue' to break results down by" in state.message and "choose one of color" in state.message
    assert {each.kind for each in open_store(loaded.sections["machine"])} == {"tasks"}


def test_worse_checkpoint_does_not_replace_the_candidate(recipe):
    from armature.flows.train_vlm import train_vlm
    from armature.tasks.mlflow_client import client

    def train(*overrides: str) -> str:
        lines = train_vlm(**recipe("train-vlm/colors", *overrides).sections, return_state=True).result()
        return next(line for line in lines if line.startswith("candidate")).removeprefix("candidate").strip()

    def accuracy() -> float:
        version = client().get_model_version_by_alias("train-vlm.custom", "candidate")
        model = client().get_logged_model(version.source.rpartition("/")[2])
        return next(metric.value for metric in model.metrics if metric.key == "accuracy")

    worse = train("trainer.learning_rate=8e-3")
    assert worse == "stays where it is: accuracy 0.25 after training, 0.5 before training"
    assert not client().search_registered_models()
    assert train("trainer.learning_rate=2e-3") == "models:/train-vlm.custom@candidate" and accuracy() == 0.75
    less = train("trainer.learning_rate=4e-3")
    assert less == "stays where it is: accuracy 0.625 after training, 0.75 the candidate" and accuracy() == 0.75
    otherwise = train("trainer.learning_rate=4e-3", "evaluation.seed=1")  # the candidate was not evaluated so
    assert otherwise == "models:/train-vlm.custom@candidate" and accuracy() != 0.75


def test_policy_worse_than_the_mean_action_does_not_become_the_candidate(recipe, tmp_path):
    from armature.flows.train_vla import train_vla
    from armature.tasks.mlflow_client import client

    (tmp_path / "data/meta").mkdir(parents=True)
    (tmp_path / "data/meta/info.json").write_text("{}")

    def train(seed: int) -> list[str]:
        """Train a policy with an action error of 0.5 plus the seed, beside 0.75 of the mean action."""
        overrides = (f"dataset.path={tmp_path / 'data'}", f"training.seed={seed}")
        lines = train_vla(**recipe("train-vla/own-robot-tiny", *overrides).sections, return_state=True).result()
        return [" ".join(line.split()) for line in lines]

    worse = train(1)
    assert "candidate stays where it is: action_error 1.5 after training, 0.75 of the mean action" in worse[-5:]
    assert "action_error 1.25 → 1.5, 0.75 of the mean action" in worse[-5:]
    assert not client().search_registered_models()
    assert "candidate models:/train-vla.custom@candidate" in train(0)[-5:]
    train(2)
    assert str(client().get_model_version_by_alias("train-vla.custom", "candidate").version) == "1"


def test_warm_start_comes_before_rl_and_is_in_the_lineage(recipe):
    from armature.flows.train_vlm import train_vlm
    from armature.tasks.lineage import lineage
    from armature.tasks.mlflow_client import client

    loaded = recipe("train-vlm/colors")
    warm_start = WarmStartSettings.model_validate(WARM_START)
    state = train_vlm(**loaded.sections, warm_start=warm_start, return_state=True)
    assert any(line.startswith("warm start") and "report.html" in line for line in state.result())
    shown = artifacts_of(state)
    assert "](" not in shown["rollouts-train-vlm"]  # no viewer is up
    assert f"`armature view --store {loaded.sections['machine'].store}`" in shown["rollouts-train-vlm"]
    rows = json.loads(shown["results"])
    assert [row["checkpoint"] for row in rows] == ["after warm start", "after training"]
    assert [row["accuracy"] for row in rows] == [0.25, 0.5]  # the trained one came from the warm-started one

    stages = client().search_runs(["1"], "tags.`armature.stage` != ''")
    assert sorted(run.data.tags["armature.stage"] for run in stages) == sorted(
        ["tasks", "model", "warm-start", "train-vlm", "evaluate", "evaluate"]
    )
    (warm,) = [run for run in stages if run.data.tags["armature.stage"] == "warm-start"]
    assert {point.step for point in client().get_metric_history(warm.info.run_id, "loss")} == {1, 2}
    names = [node.name for node in lineage(max(stages, key=lambda run: run.info.start_time).info.run_id).walk()]
    assert {"evaluate after training", "train-vlm", "warm-start", "tasks", "model"} <= set(names)
    assert names.index("train-vlm") < names.index("warm-start") < names.index("model")


def test_teacher_is_trained_first_and_found_the_second_time(recipe):
    from armature.components.artifacts.manifest import open_artifact, read_manifest
    from armature.flows.train_vlm import train_vlm
    from armature.tasks.lineage import lineage
    from armature.tasks.mlflow_client import client

    teacher = train_vlm(**recipe("train-vlm/colors").sections, return_state=True).result()
    (made,) = [line.split()[-1] for line in teacher if line.startswith("training") and "file:" not in line]
    state = train_vlm(**recipe("train-vlm/colors-distilled").sections, return_state=True)
    (used,) = [line.split()[-1] for line in state.result() if line.startswith("teacher") and "file:" not in line]
    (trained,) = [line.split()[-1] for line in state.result() if line.startswith("training") and "file:" not in line]
    assert used == made != trained
    assert read_manifest(Path(trained)).inputs["teacher"] == open_artifact(Path(made)).digest
    stages = client().search_runs(["1"], "tags.`armature.stage` = 'train-vlm'")
    names = sorted((run.info.run_name, run.data.tags["armature.reused"]) for run in stages)
    assert names == [("train-vlm", "false"), ("train-vlm", "false"), ("train-vlm of the teacher", "true")]
    last = max(stages, key=lambda run: run.info.start_time).info.run_id
    assert [node.name for node in lineage(last).walk()].count("train-vlm") == 2


def test_failing_sweep_cell_keeps_the_results_of_others(recipe):
    from armature.flows.sweep import sweep

    loaded = recipe("evaluate/sweep", 'sweep.checkpoints=["tiny/qwen2-vl", "tiny/llava"]', "sweep.seeds=[1, 13]")
    state = sweep(**loaded.sections, return_state=True)
    assert state.is_failed()
    assert state.message.startswith("2/4 cells failed: tiny/qwen2-vl-seed13: ")
    assert "seed 13 brings no luck" in state.message
    rows = {row["checkpoint"]: row for row in json.loads(artifacts_of(state)["results"])}
    assert len(rows) == 4
    assert rows["tiny/llava-seed1"]["accuracy"] == 0.51 and "no luck" in rows["tiny/llava-seed13"]["error"]


def test_failing_policy_of_a_sweep_leaves_the_others(recipe):
    from armature.flows.sweep_policies import sweep_policies

    tiny = recipe("train-vla/tiny").sections["policy"]
    policies = {name: tiny.model_copy(update={"norm_tag": name}) for name in ("comparison", "settings", "unlucky")}
    sections = dict(recipe("evaluate/libero-sweep").sections)
    sections |= {
        "machine": recipe("train-vla/tiny").sections["machine"],
        "sweep": PolicySweepSettings(policies=policies),
    }
    state = sweep_policies(**sections, return_state=True)
    assert state.is_failed() and state.message.startswith("1/3 policies failed: unlucky: ")
    rows = {row["checkpoint"]: row for row in json.loads(artifacts_of(state)["results"])}
    assert [rows[name].get("success") for name in policies] == [0.0, 0.0, ""] and "no luck" in rows["unlucky"]["error"]
    assert "all pairs" in artifacts_of(state)["summary"]


def test_checkpoint_may_be_alias_digest_or_folder(recipe):
    from armature.components.configuration.stages import open_store
    from armature.flows.evaluate import evaluate
    from armature.flows.train_vlm import train_vlm

    loaded = recipe("train-vlm/colors")
    train_vlm(**loaded.sections)
    trained = next(each for each in open_store(loaded.sections["machine"]) if each.kind == "train-vlm")
    results = []
    for name in ("models:/train-vlm.custom@candidate", trained.digest, trained.digest[:10], str(trained.path)):
        state = evaluate(**recipe("evaluate/vlm", f"subject.checkpoint={name}").sections, return_state=True)
        (row,) = json.loads(artifacts_of(state)["results"])
        results.append(row["digest"])
    assert len(set(results)) == 1


def test_rejects_incomplete_section(recipe):
    from armature.flows.train_vlm import train_vlm

    sections = dict(recipe("train-vlm/colors").sections)
    with pytest.raises(ParameterTypeError):
        train_vlm(**{**sections, "trainer": {"learning_rate": 1e-3}})


def test_policy_is_trained_and_evaluated_against_another(recipe):
    from armature.flows.evaluate_libero import evaluate_libero
    from armature.flows.train_vla import train_vla
    from armature.tasks.lineage import lineage
    from armature.tasks.mlflow_client import client

    comparison = "comparison={confidence = 0.95}"
    state = train_vla(**recipe("train-vla/tiny", comparison).sections, return_state=True)
    rows = json.loads(artifacts_of(state)["results"])
    assert [(row["checkpoint"], row["success"]) for row in rows] == [("before training", 0.0), ("after training", 0.75)]
    stages = client().search_runs(["1"], "tags.`armature.stage` != ''")
    names = ["compare-libero", "demonstrations", "evaluate-libero", "evaluate-libero", "policy", "quantile-stats"]
    assert sorted(run.data.tags["armature.stage"] for run in stages) == [*names, "train-vla"]
    version = client().get_model_version_by_alias("train-vla.custom", "candidate")
    digest = client().get_logged_model(version.source.rpartition("/")[2]).tags["checkpoint.digest"]
    names = [node.name for node in lineage(digest).walk()]
    assert names[0] == "train-vla" and {"policy", "demonstrations", "quantile-stats"} <= set(names)

    tiny = recipe("train-vla/tiny").sections["policy"]
    sections = dict(recipe("evaluate/libero", "policy.checkpoint_path=models:/train-vla.custom@candidate").sections)
    state = evaluate_libero(
        **sections | {"machine": recipe("train-vla/tiny").sections["machine"], "against": tiny}, return_state=True
    )
    rows = json.loads(artifacts_of(state)["results"])
    assert [(row["checkpoint"], row["success"]) for row in rows] == [("policy", 0.75), ("against", 0.0)]


def test_policy_rl_follows_imitation(recipe):
    from armature.flows.train_vla_rl import train_vla_rl
    from armature.tasks.lineage import lineage
    from armature.tasks.mlflow_client import client

    sections = recipe("train-vla-rl/tiny").sections
    state = train_vla_rl(**sections, return_state=True)
    rows = json.loads(artifacts_of(state)["results"])
    assert [(row["checkpoint"], row["success"]) for row in rows] == [
        ("before training", 0.75),
        ("after training", 0.75),
    ]
    version = client().get_model_version_by_alias("train-vla-rl.custom", "candidate")
    digest = client().get_logged_model(version.source.rpartition("/")[2]).tags["checkpoint.digest"]
    names = [node.name for node in lineage(digest).walk()]
    assert names[:2] == ["train-vla-rl", "train-vla"] and {"policy", "demonstrations", "quantile-stats"} <= set(names)

    with refused("sections_incomplete", "layout"):
        train_vla_rl(**{**sections, "layout": None})


@pytest.mark.parametrize(
    ("arguments", "code"),
    [({"demonstrations": None, "layout": None}, "one_kind_of_data"), ({"layout": None}, "sections_incomplete")],
)
def test_policy_needs_either_dataset_or_demonstrations(recipe, arguments, code):
    from armature.flows.train_vla import train_vla

    with refused(code, "demonstrations" if code == "sections_incomplete" else ""):
        train_vla(**{**recipe("train-vla/tiny").sections, **arguments})
