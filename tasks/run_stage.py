"""The Prefect task that runs any stage, with reuse of artifacts, retries, the GPU limit, tracking and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.concurrency.sync import concurrency
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run
from prefect.states import Completed
from pydantic import BaseModel

from armature.components.configuration.recipes import Sections
from armature.components.configuration.stages import (
    STAGES,
    find_made,
    fingerprint,
    open_store,
    refuse_unknown,
    run_stage,
)
from armature.components.configuration.trackers import tracker_places
from armature.components.contracts.errors import ServerError, TrainerError, WeightSyncError
from armature.components.contracts.installation import home_folder
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, Stage
from armature.components.viewer.runs import STAGES as VIEWED
from armature.tasks import mlflow_client as names
from armature.tasks.events import PrefectEvents, PrefectUnits
from armature.tasks.flow_run import current_run, deployment_name, provenance
from armature.tasks.reports import link_viewer, record_output
from armature.tasks.tracking import TrackedRun, end_lost_runs, tracked

GPU_LIMIT = "gpu"
"""Name of Prefect's concurrency limit with one slot for each GPU."""
REUSED = "Reused"
"""Name of the state of a task whose artifact was in the store already."""


def can_run_again(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return True if a stage failed because a server or the trainer died: a retry then resumes the stage.

    Other errors would occur again in a retry.
    """
    error = state.result(raise_on_failure=False)
    return isinstance(error, ServerError | TrainerError) and not isinstance(error, WeightSyncError)


@task(
    name="stage",
    task_run_name="{label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=can_run_again,
)
def stage_task(
    name: str, label: str, settings: BaseModel, inputs: Mapping[str, Artifact], machine: Machine, again: bool
) -> State[Artifact] | Artifact:
    """Run stage `name` as an MLflow run called `label`, nested in the flow's run.

    If the artifact is in the store already, it is returned and the task's state is "Reused". With `again` it is made
    from the beginning. A retry after a failed attempt resumes that attempt in either case.
    """
    again = again and task_run.run_count <= 1
    made = None if again else find_made(name, settings, inputs, machine)
    tags = {names.STAGE_TAG: name, names.FLOW_RUN_TAG: str(flow_run.id), "prefect.task_run_id": str(task_run.id)}
    parent = current_run()
    with tracked(flow_run.flow_name, task_run.name, tags, sections={name: settings}, parent=parent) as tracking:
        tracking.log_artifacts([(each, "input", None) for each in inputs.values()])
        reported: set[str | int] = set()
        begins = partial(end_lost_runs, tracking, parent)
        artifact = made or _make(name, settings, inputs, machine, tracking, reported, again, begins)
        tracking.log_artifacts([(artifact, "output", None)])
        tracking.tag({names.DIGEST_TAG: artifact.digest, "armature.reused": str(made is not None).lower()})
        record_output(tracking, artifact, inputs, machine, reported)
    if made is not None:
        return Completed(name=REUSED, message=f"already made: {made.path}", data=made)
    return artifact


def run(name: str, recipe: Sections, of: str = "", **inputs: Artifact) -> Artifact:
    """Run a stage of a flow with its sections of the recipe, and return its artifact, new or reused.

    Args:
        name: the stage's name.
        of: a suffix for the task run's name, if the flow runs the stage several times.
        inputs: artifacts that the stage reads, by the names of its inputs.
    """
    stage: Stage[Any] = STAGES[name]
    return run_with(name, recipe.settings_for(stage.settings), recipe.machine, of, **inputs)


def run_with(name: str, settings: BaseModel, machine: Machine, of: str = "", /, **inputs: Artifact) -> Artifact:
    """Run stage `name` of a flow with these settings, and return its artifact, new or reused.

    `of` is a suffix for the task run's name, and `inputs` are the artifacts that the stage reads, by the names of its
    inputs.

    If `machine.force` names the stage, or a stage that made one of its inputs, the artifact is made again, but only
    once in a flow run.
    """
    refuse_unknown(machine.force)
    stage: Stage[Any] = STAGES[name]
    settings = stage.resolve(settings, inputs, lambda text: get_run_logger().info(text))
    history, key = provenance(), fingerprint(stage, settings, inputs)
    forced = name in machine.force or any(each.path.name in history.remade for each in inputs.values())
    again = forced and key not in history.remade
    label = f"{name} {of}".strip()
    if name in VIEWED:
        link_viewer(label, key, Path(machine.store).resolve())
    state: State[Any] = stage_task(name, label, settings, inputs, machine, again, return_state=True)
    artifact: Artifact = state.result()
    if again:
        history.remade.add(key)
    if state.name != REUSED:
        history.made.add(key)
    elif key not in history.made:
        history.reused.add(key)
    return artifact


def _make(
    name: str,
    settings: BaseModel,
    inputs: Mapping[str, Artifact],
    machine: Machine,
    tracking: TrackedRun,
    reported: set[str | int],
    again: bool,
    begins: Callable[[str], None],
) -> Artifact:
    """Run stage `name` within a task and return its artifact.

    It holds the GPU limit and reports to Prefect, MLflow and the trackers of `machine.report_to`. `reported` receives
    the steps and digests that were reported. `again` and `begins` are passed to the function `run_stage`.
    """
    with (
        gpus(machine),
        PrefectEvents(tracking, reported, home_folder() / machine.store) as events,
        PrefectUnits() as units,
    ):
        tracked_as = str(flow_run.flow_name), f"{deployment_name()} {task_run.name}"
        recipe = f"{flow_run.flow_name}/{deployment_name()}"
        made = run_stage(name, settings, inputs, machine, events, units, again, begins, tracked_as, recipe)
    if machine.report_to:
        places = tracker_places(open_store(machine).workspace(name, made.path.name))
        provenance().trackers.update({place: tracker for tracker, place in places.items()})
    return made


@contextmanager
def gpus(machine: Machine) -> Iterator[None]:
    """Hold one slot of Prefect's concurrency limit "gpu" for each GPU that the machine's settings name.

    It is an error if the limit does not exist. A lease that could not be renewed is not an error, because it would end
    a training of hours.
    """
    devices = {*machine.started_server_gpus, *machine.trainer.gpus}
    lock = (
        concurrency(GPU_LIMIT, occupy=len(devices), strict=True, raise_on_lease_renewal_failure=False)
        if devices
        else nullcontext()
    )
    with lock:
        yield
