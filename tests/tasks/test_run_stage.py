"""A stage as a Prefect task: what is on the run's page and in MLflow is what the stage did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas import TaskRun

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.machine.process import Program
from tests.refusals import refused

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("prefect_server", "demo_stages", "tracking")


@pytest.fixture
def chain(demo_stages, machine):
    """A flow that runs the demo stages tasks and train. It returns the id of its MLflow run and the two artifacts."""
    from armature.tasks.flow_run import tracked_flow
    from armature.tasks.run_stage import run

    @flow(name="demo-chain")
    def demo_chain(tasks, train):
        recipe = demo_stages.DemoRecipe(tasks=tasks, train=train, machine=machine)
        with tracked_flow(recipe) as tracking:
            made = run("demo-tasks", recipe)
            trained = run("demo-train", recipe, tasks=made)
        return tracking.run_id, made, trained

    return demo_chain


def read_task_runs(flow_run_id) -> list[TaskRun]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import TaskRunSort

    with get_client(sync_client=True) as client:
        return client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])), limit=200, sort=TaskRunSort.NAME_ASC
        )


def task_runs(flow_run_id) -> dict[str, str]:
    return {run.name: run.state.name if run.state else "" for run in read_task_runs(flow_run_id)}


def eventually(check, seconds=20.0):
    """Wait until `check` returns a true value. Task runs reach the server as events, so they appear there a little
    later."""
    import time

    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_units_are_task_runs_and_lineage_reaches_the_tasks(chain, demo_stages):
    from armature.tasks.lineage import lineage
    from armature.tasks.mlflow_client import client

    settings = demo_stages.TasksSettings(count=3), demo_stages.TrainSettings(steps=3, rate=0.1)
    state = chain(*settings, return_state=True)
    run_id, made, trained = state.result()
    expected = {f"{kind}-{step}" for kind in ("rollouts", "batch", "step", "sync") for step in range(3)}
    flow_run_id = state.state_details.flow_run_id
    eventually(lambda: expected | {"demo-tasks", "demo-train"} == set(task_runs(flow_run_id)))

    tree = lineage(trained.digest)
    assert tree.digest == trained.digest
    names = [node.name for node in tree.walk()]
    assert names.count("batch-2") == 1 and names.count("rollouts-2") == 1
    batch = next(node for node in tree.walk() if node.name == "batch-2")
    assert [parent.name for parent in batch.parents] == ["rollouts-2"]
    assert made.digest in {node.digest for node in batch.walk()}

    parent = client().get_run(run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["train.steps"] == "3" and parent.data.params["tasks.count"] == "3"
    assert parent.data.tags["prefect.flow_run_id"] == str(flow_run_id)
    nested = client().get_run(tree.made_by)
    assert [point.value for point in client().get_metric_history(nested.info.run_id, "loss")] == [1, 1 / 2, 1 / 3]


def test_task_runs_do_not_inherit_the_flow_run_tags(chain, demo_stages):
    from armature.tasks.mlflow_client import client

    settings = demo_stages.TasksSettings(count=6), demo_stages.TrainSettings(steps=1, rate=0.1)
    with tags("deployment:demo"):
        state = chain(*settings, return_state=True)
    flow_run_id = state.state_details.flow_run_id
    eventually(lambda: len(task_runs(flow_run_id)) == 6)
    assert not any(run.tags for run in read_task_runs(flow_run_id))
    assert client().get_run(state.result()[0]).data.tags["armature.deployment"] == "demo"


def test_second_run_reuses_every_artifact(chain, demo_stages):
    settings = demo_stages.TasksSettings(count=4), demo_stages.TrainSettings(steps=1, rate=0.1)
    first = chain(*settings)
    state = chain(*settings, return_state=True)
    second = state.result()
    assert second[1:] == first[1:]
    runs_id = state.state_details.flow_run_id
    eventually(lambda: task_runs(runs_id) == {"demo-tasks": "Reused", "demo-train": "Reused"})


def test_retries_dead_server_but_not_bad_data(chain, demo_stages, tmp_path):
    tasks = demo_stages.TasksSettings(count=5)
    _, _, trained = chain(tasks, demo_stages.TrainSettings(steps=1, rate=0.2, fail_once=str(tmp_path / "failed")))
    assert (trained.path / "weights.txt").read_text() == "1 0.2"
    with refused("bad_row", "row 7", kind=DataError):
        chain(tasks, demo_stages.TrainSettings(steps=1, rate=0.2, refuse=True))


LOST = """
import sys
from pathlib import Path

from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.configuration.stages import STAGES, run_stage
from armature.tasks.tracking import end_lost_runs
from armature.tasks.tracking import open_run

demo, settings, tasks, digest, store = sys.argv[1:]
sys.path.insert(0, demo)
import demo_stages

STAGES._entries["demo-train"] = "demo_stages:TRAIN"
flow = open_run("demo-chain", "lost", {})
stage = open_run("demo-chain", "lost stage", {}, flow)
run_stage(
    "demo-train",
    demo_stages.TrainSettings.model_validate_json(settings),
    {"tasks": Artifact(kind="demo-tasks", path=Path(tasks), digest=digest)},
    Machine(store=store),
    begins=lambda fingerprint: end_lost_runs(stage, flow, fingerprint),
)
"""


def test_runs_of_a_killed_process_are_closed(chain, demo_stages, machine, tmp_path):
    from armature.tasks.mlflow_client import client

    hung = tmp_path / "hung"
    tasks, train = demo_stages.TasksSettings(count=6), demo_stages.TrainSettings(steps=1, rate=0.4, hang_once=str(hung))
    _, made, _ = chain(tasks, demo_stages.TrainSettings(steps=1, rate=0.1))
    words = (Path(__file__).parent, train.model_dump_json(), made.path, made.digest, machine.store)
    lost = Program([sys.executable, "-c", LOST, *map(str, words)], env={"PYTHONPATH": str(ROOT)}, log=tmp_path / "log")
    eventually(lambda: hung.exists() or lost.returncode is not None, 120)
    assert lost.returncode is None, lost.tail()
    lost.stop()
    experiment = client().get_experiment_by_name("demo-chain").experiment_id

    def statuses() -> dict[str, str]:
        return {run.info.run_name: run.info.status for run in client().search_runs([experiment])}

    assert statuses()["lost"] == statuses()["lost stage"] == "RUNNING"
    chain(tasks, train)
    assert statuses().pop("lost") == statuses().pop("lost stage") == "KILLED"
    assert "RUNNING" not in statuses().values()


@pytest.fixture
def evaluated(demo_stages, machine):
    """The flow tasks -> train -> evaluate with a report; returns its lines and its artifacts."""
    from armature.tasks.flow_run import tracked_flow
    from armature.tasks.reports import CheckpointResult, report
    from armature.tasks.run_stage import run

    @flow(name="demo-evaluated")
    def demo_evaluated(train, evaluate, force=(), report_to=()):
        here = machine.model_copy(update={"force": force, "report_to": report_to})
        tasks = demo_stages.TasksSettings(count=7)
        recipe = demo_stages.DemoRecipe(tasks=tasks, train=train, evaluate=evaluate, machine=here)
        with tracked_flow(recipe) as tracking:
            tasks = run("demo-tasks", recipe)
            model = run("demo-train", recipe, tasks=tasks)
            result = run("demo-evaluate", recipe, tasks=tasks, model=model)
            twice = run("demo-evaluate", recipe, tasks=tasks, model=model)
            assert twice == result
            return report(tracking, [CheckpointResult("after training", result)], {}), (tasks, model, result)

    return lambda *force, report_to=(): demo_evaluated(
        demo_stages.TrainSettings(steps=2, rate=0.3), demo_stages.EvaluateSettings(seed=5), force, report_to
    )


def inodes(made):
    return [(each.path / "manifest.json").stat().st_ino for each in made]


def test_force_remakes_a_stage_and_its_dependents(evaluated, machine):
    lines, made = evaluated()
    assert "reused" not in lines[0]
    first = inodes(made)
    lines, again = evaluated()
    assert "reused=yes" in lines[0] and inodes(again) == first
    lines, again = evaluated("demo-train")
    assert "reused" not in lines[0] and again == made
    assert [new == old for new, old in zip(inodes(again), first, strict=True)] == [True, False, False]
    aside = sorted(path.name.rpartition("-")[0] for path in (Path(machine.store) / "replaced").iterdir())
    assert aside == [f"demo-evaluate-{made[2].path.name}", f"demo-train-{made[1].path.name}"]
    with pytest.raises(ConfigurationError) as caught:
        evaluated("demo-trian")
    assert "machine.force" in caught.value.where


def test_tracker_has_the_metrics_of_mlflow_and_the_last_lines_say_where(evaluated):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from armature.tasks.lineage import lineage
    from armature.tasks.mlflow_client import client

    lines, (_, model, _) = evaluated(report_to=("tensorboard",))
    assert lines[-2].split()[0] == "tensorboard" and lines[-1].split()[0] == "MLflow"
    folder = Path(lines[-2].rpartition("--logdir ")[2])
    (home,) = folder.iterdir()  # only the stage with metrics of steps
    assert folder.name == "demo-evaluated" and home.name.startswith("custom demo-train-")
    points = [(each.step, each.value) for each in EventAccumulator(str(home)).Reload().Scalars("loss")]
    tracked = client().get_metric_history(lineage(model.digest).made_by, "loss")
    assert points == [(each.step, each.value) for each in tracked] == [(0, 1.0), (1, 0.5)]
