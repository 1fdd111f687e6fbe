"""`armature submit` on a real Prefect API: what is started, what is refused, and how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from threading import Thread
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, LogCreate, WorkPoolCreate
from prefect.settings import get_current_settings
from prefect.states import Completed, Failed, Running
from prefect.types._datetime import now

from armature import deployments, submit
from armature.components.configuration import load_recipe
from armature.init import write_project
from armature.provision import JOB_TEMPLATE

JOBS = json.loads(
    Template((Path(__file__).parents[2] / "infra/kubernetes/base/job-template.json").read_text()).substitute(
        IMAGE="flows", STANDALONE_IMAGE="standalone", NAMESPACE="armature"
    )
)
NODES = {"node_selector": {"gpu": "h200", "a.b/c": "d"}}
OTHERS = {"store_claim": "store-fast", "tolerations": [{"operator": "Exists"}]}

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def armature(armature, monkeypatch):
    """The command `armature` in this process. The address of Prefect's API is in the environment."""
    monkeypatch.setenv("PREFECT_API_URL", str(get_current_settings().api.url))
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.1)
    return armature


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as opened:
        yield opened


@pytest.fixture
def deployed(client, armature) -> Callable[..., str]:
    """A function that registers the deployment of a recipe with a new work pool, and returns the pool's name. With a
    job template, it is a Kubernetes pool."""

    def deploy(name: str, template: dict[str, Any] | None = None) -> str:
        recipe = load_recipe(name)
        pool, kind = f"pool-{time.time_ns()}", "process" if template is None else "kubernetes"
        client.create_work_pool(WorkPoolCreate(name=pool, type=kind, base_job_template=template or JOB_TEMPLATE))
        flow = deployments.flow_of(recipe.kind)
        client.create_deployment(
            flow_id=client.create_flow(flow),
            parameter_openapi_schema=flow.parameters.model_dump(),
            enforce_parameter_schema=True,
            name=recipe.name.partition("/")[2],
            **deployments.deployment(recipe, template) | {"work_pool_name": pool},
        )
        return pool

    return deploy


def runs(client: SyncPrefectClient, name: str) -> list[Any]:
    deployment = client.read_deployment_by_name(name)
    return [run for run in client.read_flow_runs() if run.deployment_id == deployment.id]


def test_submit_changes_one_value_and_keeps_the_others(armature, client, deployed):
    pool = deployed("train-vlm/colors")
    refused = armature("submit", "train-vlm/colors")
    assert refused.code == 1 and f"no worker serves the work pool {pool!r}" in refused.stderr
    assert f"armature up --pool {pool}" in refused.stderr and runs(client, "train-vlm/colors") == []

    client.send_worker_heartbeat(pool, "a worker")
    done = armature("submit", "train-vlm/colors", "--set", "trainer.max_steps=20", "--machine", "servers.count=2")
    assert done.code == 0, done.stderr
    (run,) = runs(client, "train-vlm/colors")
    name, page = done.stdout.split()
    assert name == run.name and page.endswith(f"/runs/flow-run/{run.id}")
    stored = client.read_deployment_by_name("train-vlm/colors").parameters
    assert run.parameters["trainer"] == stored["trainer"] | {"max_steps": 20}
    assert stored["trainer"]["max_steps"] == 60 and run.parameters["machine"]["servers"]["count"] == 2
    others = {"trainer", "machine"}
    assert {key: value for key, value in run.parameters.items() if key not in others} == {
        key: value for key, value in stored.items() if key not in others
    }


def test_kubernetes_job_has_resources_for_the_changed_machine(armature, client, deployed):
    client.send_worker_heartbeat(deployed("train-vlm/qwen3-vl", JOBS), "a worker")
    more, joined = (
        {"gpus": 3, "cpus": "14", "memory": "232Gi"},
        {"image": "flows", "gpus": 1, "cpus": "6", "memory": "112Gi"},
    )
    for arguments, expected in (
        (["--machine", "trainer.gpus=[0, 2]"], more),
        (["--machine", 'servers.endpoints=["http://vllm-0.vllm:8000"]'], joined),
        (["--set", "trainer.max_steps=7"], {}),
        (["--job-variable", "cpus=8"], {"cpus": "8"}),
        (["--job-variable", "node_selector.gpu=h200", "--job-variable", 'node_selector={"a.b/c"="d"}'], NODES),
        (["--job-variable", "store_claim=store-fast", "--job-variable", 'tolerations=[{operator="Exists"}]'], OTHERS),
        (["--machine", "trainer.gpus=[0, 2]", "--job-variable", "gpus=8"], more | {"gpus": 8}),
    ):
        existing = {run.id for run in runs(client, "train-vlm/qwen3-vl")}
        done = armature("submit", "train-vlm/qwen3-vl", *arguments)
        assert done.code == 0, done.stderr
        (run,) = [each for each in runs(client, "train-vlm/qwen3-vl") if each.id not in existing]
        assert run.job_variables == expected


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ("nodeselector.gpu=h200", "did you mean 'node_selector'"),
        ("gpus=two", "'two' is not of type 'integer'"),
        ("image=other", "'other' is not one of ['flows', 'standalone']"),
        ("store_claim=mlflow", "'mlflow' does not match"),
        ("store_claim", "write --job-variable key=value"),
        ("store_claim=", "write --job-variable key=value"),
    ],
)
def test_rejects_job_variable_that_the_template_lacks(arguments, output, armature, client, deployed):
    client.send_worker_heartbeat(deployed("train-vlm/colors", JOBS), "a worker")
    before = len(runs(client, "train-vlm/colors"))
    done = armature("submit", "train-vlm/colors", "--job-variable", arguments)
    assert done.code == 2 and output in done.stderr, done.stderr
    assert len(runs(client, "train-vlm/colors")) == before


def test_process_pool_runs_have_no_job_variables(armature, client, deployed):
    client.send_worker_heartbeat(deployed("train-vlm/colors"), "a worker")
    done = armature("submit", "train-vlm/colors", "--job-variable", "cpus=8")
    assert done.code == 2 and "'cpus' is not a variable" in done.stderr and "leave it out" in done.stderr
    job = armature("submit", "train-vlm/colors", "--slurm", "--dry-run", "--job-variable", "cpus=8")
    assert job.code == 2 and "--job-variable" in job.stderr


@pytest.mark.parametrize("template", [None, JOBS])
def test_rejects_run_that_needs_another_pool(armature, client, deployed, template):
    client.send_worker_heartbeat(deployed("train-vlm/colors", template), "a worker")
    before = len(runs(client, "train-vlm/colors"))
    done = armature("submit", "train-vlm/colors", "--machine", "trainer.gpus=[0]")
    assert done.code == 2 and "needs the work pool 'train-gpu'" in done.stderr
    assert len(runs(client, "train-vlm/colors")) == before


def test_submit_rejects_the_same_values_as_run(armature, client, deployed):
    client.send_worker_heartbeat(deployed("train-vlm/colors"), "a worker")
    before = len(runs(client, "train-vlm/colors"))
    for arguments in (
        ["--set", "trainer.max_stepz=3"],
        ["--set", "trainer.max_steps=0"],
        ["--set", "environment.args.image_sise=3"],
        ["--set", "trainr.max_steps=3"],
        ["--set", "trainer"],
        ["--machine", "servers.count=none"],
    ):
        submitted, run = (armature(command, "train-vlm/colors", *arguments) for command in ("submit", "run"))
        output = [[line for line in done.stderr.splitlines() if "where:" not in line] for done in (submitted, run)]
        assert submitted.code == run.code == 2 and output[0] == output[1] != []
    assert len(runs(client, "train-vlm/colors")) == before


def test_submits_own_recipe_by_its_file(armature, client, deployed, tmp_path):
    write_project(tmp_path / "demo")
    client.send_worker_heartbeat(deployed("demo/recipe.toml"), "a worker")
    done = armature("submit", "demo/recipe.toml", "--set", "environment.heldout_tasks=8")
    assert done.code == 0, done.stderr
    assert runs(client, "train-vlm/recipe")[0].parameters["environment"]["heldout_tasks"] == 8


@pytest.mark.parametrize(("end", "code"), [(Completed(), 0), (Failed(message="out of memory"), 1)])
def test_watch_prints_the_log_and_the_outcome(end, code, armature, client, deployed):
    client.send_worker_heartbeat(deployed("train-vlm/colors"), "a worker")
    existing = {run.id for run in runs(client, "train-vlm/colors")}

    def work() -> None:
        with get_client(sync_client=True) as worker:
            while not (new := [run for run in runs(worker, "train-vlm/colors") if run.id not in existing]):
                time.sleep(0.1)
            worker.set_flow_run_state(new[0].id, Running(), force=True)
            lines = [f"line {number}" for number in range(450)]  # more than one answer of the API
            for start in range(0, len(lines), 150):
                worker.create_logs(
                    [
                        LogCreate(name="flow", level=20, message=line, timestamp=now("UTC"), flow_run_id=new[0].id)
                        for line in lines[start : start + 150]
                    ]
                )
            text = "[The run](http://127.0.0.1)\n\n- `after training  accuracy=0.5`\n"
            worker.create_artifact(ArtifactCreate(key="summary", type="markdown", data=text, flow_run_id=new[0].id))
            worker.set_flow_run_state(new[0].id, end, force=True)

    working = Thread(target=work)
    working.start()
    done = armature("submit", "train-vlm/colors", "--watch")
    working.join()
    assert done.code == code, done.stderr
    *lines, summary = done.stdout.splitlines()
    assert summary == "after training  accuracy=0.5"
    output = [line.partition("  ")[2] for line in lines]
    assert [line for line in output if line.startswith("line ")] == [f"line {number}" for number in range(450)]
    assert output[-1] == ("Failed: out of memory" if code else "Completed")


def test_missing_deployment_api_or_platform_is_an_error(armature, monkeypatch, deployed):
    deployed("train-vlm/colors")
    for name in ("train-vlm/colrs", "colors", "a/b/c"):
        unknown = armature("submit", name)
        assert unknown.code == 2 and f"no deployment is called {name!r}" in unknown.stderr
    assert "train-vlm/colors" in armature("submit", "train-vlm/colrs").stderr
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    away = armature("submit", "train-vlm/colors")
    assert away.code == 1 and "Prefect's API does not answer" in away.stderr
    monkeypatch.delenv("PREFECT_API_URL")
    none = armature("submit", "train-vlm/colors")
    assert none.code == 1 and "no platform is running here" in none.stderr


def test_rejects_a_deployment_of_a_foreign_flow(armature, client):
    from prefect import flow

    @flow(name="theirs")
    def theirs() -> None:
        """Do nothing. This flow does not belong to Armature."""

    client.create_deployment(flow_id=client.create_flow(theirs), name="deployment", entrypoint="theirs.py:theirs")
    done = armature("submit", "theirs/deployment")
    assert done.code == 2 and "code: foreign_deployment" in done.stderr


def test_counts_recipes_of_pools_without_worker():
    names = ["train-vlm/colors", "train-vlm/qwen3-vl", "train-vla/molmoact2"]
    assert deployments.without_worker(["cpu"], names) == {"train-gpu": 2}
    assert deployments.without_worker(["cpu", "train-gpu"], names) == {}
