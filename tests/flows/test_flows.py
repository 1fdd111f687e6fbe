"""Flows on a real Prefect API and a real MLflow."""

from __future__ import annotations

import inspect
import json

import httpx
import pytest
from prefect.exceptions import ParameterTypeError
from prefect.settings import get_current_settings

from armature.deployments import flow_of
from components.recipes import RECIPES
from components.sft.settings import WarmStartSettings
from tests.sft.test_stage import VALUES as WARM_START

pytestmark = pytest.mark.usefixtures("prefect_server", "tracking", "small_stages")


def artifacts_of(state) -> dict[str, str]:
    """The artifacts on the run's page, by key."""
    chosen = {"artifacts": {"flow_run_id": {"any_": [str(state.state_details.flow_run_id)]}}}
    answer = httpx.post(f"{get_current_settings().api.url}/artifacts/filter", json=chosen)
    return {each["key"]: each["data"] for each in answer.raise_for_status().json()}


@pytest.mark.parametrize("name", RECIPES)
def test_prefect_s_form_has_the_sections_of_the_recipe(name):
    flow, fields = flow_of(name if "/" in name else f"{name}/any"), RECIPES[name].model_fields
    form = flow.parameters
    assert list(form.properties) == list(fields)
    described = flow.description.partition("Args:")[2].split("\n")
    assert [line.strip() for line in described if line] == [
        f"{key}: {each.description}" for key, each in fields.items()
    ]
    assert set(form.required) == set(fields) - RECIPES[name].optional() - {"machine"}
    annotations = {key: each.annotation for key, each in inspect.signature(flow.fn).parameters.items()}
    assert annotations == {key: each.annotation for key, each in fields.items()}


def test_training_ends_with_a_candidate_whose_evaluation_leads_back_to_everything(recipe):
    from flows.train_vlm import train_vlm
    from tasks.lineage import lineage
    from tasks.mlflow_client import client

    loaded = recipe("train-vlm/colors")
    state = train_vlm(**loaded.sections, return_state=True)
    lines = state.result()
    assert any(line.startswith("MLflow") for line in lines)
    assert any("report.html" in line for line in lines) and any("rollouts.html" in line for line in lines)
    shown = artifacts_of(state)
    assert {"results", "summary", "mlflow"} <= set(shown)
    assert [row["checkpoint"] for row in json.loads(shown["results"])] == ["before training", "after training"]

    version = client().get_model_version_by_alias("train-vlm.custom", "candidate")
    model = client().get_logged_model(version.source.rpartition("/")[2])
    (run,) = client().search_runs(["1"], "tags.`armature.stage` = 'train-vlm'")
    assert {point.step for point in client().get_metric_history(run.info.run_id, "reward")} >= {1, 2, 3, 4}
    evaluations = client().search_runs(["1"], "tags.`armature.stage` = 'evaluate'")
    measured = {metric.run_id for metric in model.metrics if metric.key == "accuracy"}
    (after,) = [each for each in evaluations if each.info.run_id in measured]
    kinds = {node.name for node in lineage(after.info.run_id).walk()}
    assert {"evaluate", "train-vlm", "tasks", "model"} <= kinds
    digests = {node.digest for node in lineage(after.info.run_id).walk()}
    assert model.tags["checkpoint.digest"] in digests


def test_a_warm_start_comes_before_the_rewards_and_is_in_what_the_result_was_made_from(recipe):
    from flows.train_vlm import train_vlm
    from tasks.lineage import lineage
    from tasks.mlflow_client import client

    loaded = recipe("train-vlm/colors")
    warm_start = WarmStartSettings.model_validate(WARM_START)
    state = train_vlm(**loaded.sections, warm_start=warm_start, return_state=True)
    assert any(line.startswith("warm start") and "report.html" in line for line in state.result())
    rows = json.loads(artifacts_of(state)["results"])
    assert [row["checkpoint"] for row in rows] == ["after warm start", "after training"]
    assert [row["accuracy"] for row in rows] == [0.25, 0.5]  # the trained one came from the warm-started one

    stages = client().search_runs(["1"], "tags.`armature.stage` != ''")
    assert sorted(run.data.tags["armature.stage"] for run in stages) == sorted(
        ["tasks", "model", "sft", "train-vlm", "evaluate", "evaluate"]
    )
    (warm,) = [run for run in stages if run.data.tags["armature.stage"] == "sft"]
    assert {point.step for point in client().get_metric_history(warm.info.run_id, "loss")} >= {1, 2}
    names = [node.name for node in lineage(max(stages, key=lambda run: run.info.start_time).info.run_id).walk()]
    assert {"evaluate", "train-vlm", "sft", "tasks", "model"} <= set(names)
    assert names.index("train-vlm") < names.index("sft") < names.index("model")


def test_a_failing_cell_leaves_the_good_ones(recipe):
    from flows.sweep import sweep

    loaded = recipe("evaluate/sweep", 'sweep.checkpoints=["tiny/qwen2-vl", "tiny/llava"]', "sweep.seeds=[1, 13]")
    state = sweep(**loaded.sections, return_state=True)
    assert state.is_failed()
    assert state.message.startswith("2/4 cells failed: tiny/qwen2-vl-seed13: ")
    assert "seed 13 brings no luck" in state.message
    rows = {row["checkpoint"]: row for row in json.loads(artifacts_of(state)["results"])}
    assert len(rows) == 4
    assert rows["tiny/llava-seed1"]["accuracy"] == 0.51 and "no luck" in rows["tiny/llava-seed13"]["error"]


def test_a_checkpoint_may_be_an_alias_a_digest_or_a_folder(recipe):
    from components.stages import open_store
    from flows.evaluate import evaluate
    from flows.train_vlm import train_vlm

    loaded = recipe("train-vlm/colors")
    train_vlm(**loaded.sections)
    trained = next(each for each in open_store(loaded.sections["machine"]) if each.kind == "train-vlm")
    results = []
    for name in ("models:/train-vlm.custom@candidate", trained.digest, trained.digest[:10], str(trained.path)):
        state = evaluate(**recipe("evaluate/vlm", f"subject.checkpoint={name}").sections, return_state=True)
        (row,) = json.loads(artifacts_of(state)["results"])
        results.append(row["digest"])
    assert len(set(results)) == 1


def test_a_half_given_section_is_refused_and_not_half_defaulted(recipe):
    from flows.train_vlm import train_vlm

    sections = dict(recipe("train-vlm/colors").sections)
    with pytest.raises(ParameterTypeError, match="Field required"):
        train_vlm(**{**sections, "trainer": {"learning_rate": 1e-3}})


def test_a_policy_is_trained_on_demonstrations_and_its_candidate_evaluated_against_another(recipe):
    from flows.evaluate_libero import evaluate_libero
    from flows.train_vla import train_vla
    from tasks.lineage import lineage
    from tasks.mlflow_client import client

    comparison = "comparison={confidence = 0.95}"
    state = train_vla(**recipe("train-vla/tiny", comparison).sections, return_state=True)
    rows = json.loads(artifacts_of(state)["results"])
    assert [(row["checkpoint"], row["success"]) for row in rows] == [("before training", 0.0), ("after training", 0.75)]
    stages = client().search_runs(["1"], "tags.`armature.stage` != ''")
    assert sorted(run.data.tags["armature.stage"] for run in stages) == sorted(
        [
            "demonstrations",
            "quantile-stats",
            "policy",
            "train-vla",
            "evaluate-libero",
            "evaluate-libero",
            "compare-libero",
        ]
    )
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


@pytest.mark.parametrize(
    ("given", "said"), [({"demonstrations": None, "layout": None}, "neither is given"), ({"layout": None}, "layout")]
)
def test_a_policy_is_trained_on_one_kind_of_data(recipe, given, said):
    from components.contracts.errors import ConfigurationError
    from flows.train_vla import train_vla

    with pytest.raises(ConfigurationError, match=said):
        train_vla(**{**recipe("train-vla/tiny").sections, **given})
