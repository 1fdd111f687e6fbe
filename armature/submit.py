"""`armature submit`: start a run of a deployment with changed values on the platform's workers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from armature.components.configuration import SUFFIX, Recipe, build_recipe, load_recipe, merge, parse_override
from armature.components.configuration.recipes import RECIPES
from armature.components.configuration.tables import Written
from armature.components.contracts.errors import ConfigurationError, ServerError
from armature.components.machine.project import project
from armature.components.machine.registry import suggestion
from armature.deployments import USE_PROJECT, deploy, pod_variables, pool_of
from armature.run import joined_api

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse


def parse_job_variables(texts: Sequence[str], template: Mapping[str, Any], pool: str) -> dict[str, Any]:
    """Parse the texts of `armature submit --job-variable`, which set variables of a work pool's base job template.

    Args:
        texts: `key=value` or `key.entry=value`; values are written as for `--set`.
        template: base job template of the work pool `pool`.

    Raises:
        ConfigurationError: a text has another form, or the template does not have such a variable or value.
    """
    properties = template.get("variables", {}).get("properties", {})
    variables: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if not key.strip() or not value.strip():
            raise ConfigurationError(
                f"not a variable and its value: {text!r}",
                code="invalid_job_variable",
                remedy="write --job-variable key=value",
            )
        variables = merge(variables, parse_override(text))
    for key, value in variables.items():
        if key not in properties:
            raise ConfigurationError(
                f"{key!r} is not a variable of the job template",
                code="unknown_job_variable",
                where=f"--job-variable, work pool {pool!r}",
                remedy=suggestion(key, properties) if properties else "leave it out: this pool has no job variables",
            )
        if properties[key].get("type") == "string" and isinstance(value, Written):
            variables[key] = value.text
    if error := best_match(Draft202012Validator(template["variables"]).iter_errors(variables)) if variables else None:
        raise ConfigurationError(
            error.message,
            code="invalid_job_variable",
            where=f"--job-variable {'.'.join(map(str, error.absolute_path))}, work pool {pool!r}",
            remedy=properties[error.absolute_path[0]].get("description", "") if error.absolute_path else "",
        )
    return variables


POLL_SECONDS = 2.0
"""Seconds between two requests for the state of a watched run."""
LOGS_PER_CALL = 200
SUMMARY = "summary"
"""Key of the Prefect artifact with a run's summary, which tasks/reports.py makes."""


def submit(name: str, overrides: Sequence[str], watch: bool, job_variables: Sequence[str] = ()) -> int:
    """Start a run of a deployment and print the run's name and page.

    Args:
        name: name of the deployment, or the file of its recipe.
        overrides: values to change, as for `--set`.
        watch: print the run's log, and return when the run has ended.
        job_variables: variables of the work pool's job template, see `parse_job_variables`.

    Returns:
        Exit code 0; with `watch`, 1 if the run did not complete.

    Raises:
        ConfigurationError: the deployment does not exist, a value is invalid, or the run would need another work pool.
            Nothing is started.
        ServerError: Prefect's API does not answer, or no worker serves the deployment's work pool.
    """
    recipe = load_recipe(name) if name.endswith(SUFFIX) else None
    with platform() as client:
        from prefect.utilities.urls import url_for

        deployment = _deployment(client, recipe.name if recipe else name)
        before, after = _recipes(deployment, name, recipe, overrides)
        variables = _job_variables(client, deployment, before, after, job_variables)
        _refuse_without_worker(client, deployment, str(client.api_url))
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters=_changed(before, after), job_variables=variables
        )
        print(f"{run.name}  {url_for(run) or ''}", flush=True)
        return _watch(client, run) if watch else 0


def platform() -> SyncPrefectClient:
    """Return a client of the platform's Prefect API.

    Raises:
        ServerError: no platform runs in this folder, and PREFECT_API_URL is not set.
    """
    if joined_api() is None:
        raise ServerError(
            "no platform is running here",
            code="platform_unknown",
            where=str(Path.cwd()),
            remedy="`armature up --detach`; or name the API of another: PREFECT_API_URL and PREFECT_API_AUTH_STRING",
        )
    os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")  # this process runs no flow, so it has no logs
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def deploy_recipes(names: Sequence[str]) -> None:
    """Create the deployments of recipes on the platform and print the names of the deployments.

    `names` are recipe names or files. If it is empty, all installed recipes get a deployment.

    Raises:
        ConfigurationError: a recipe is invalid, or two recipes would have the same deployment.
        ServerError: Prefect's API does not answer.
    """
    with platform() as client:
        for name in deploy(client, names):
            print(name, flush=True)


def _deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """Return the deployment called `name`.

    Raises:
        ConfigurationError: it does not exist; the remedy suggests the most similar name.
    """
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(name)
    except (ObjectNotFound, ValueError) as error:  # Prefect raises ValueError for a name without a slash
        flows = {flow.id: flow.name for flow in client.read_flows()}
        names = [f"{flows.get(each.flow_id)}/{each.name}" for each in client.read_deployments()]
        raise ConfigurationError(
            f"no deployment is called {name!r}",
            code="unknown_deployment",
            where=str(client.api_url),
            remedy=f"{suggestion(name, names)}; `armature deploy` creates the deployment of a recipe",
        ) from error


def _recipes(
    deployment: DeploymentResponse, name: str, recipe: Recipe | None, overrides: Sequence[str]
) -> tuple[Recipe, Recipe]:
    """Return two recipes: the one that the deployment has stored, and the same one with the overrides, for the run.

    Raises:
        ConfigurationError: the deployment's flow is not one of ours, or `armature run --set` would refuse a value.
    """
    kind = next((kind for kind in RECIPES if deployment.entrypoint == RECIPES[kind].FLOW), None)
    if kind is None:
        raise ConfigurationError(
            "the deployment runs a flow that Armature does not have",
            code="foreign_deployment",
            where=f"{name}: {deployment.entrypoint}",
            remedy="armature list",
        )
    stored = {section: values for section, values in deployment.parameters.items() if values is not None}
    values: dict[str, Any] = {"flow": kind, **stored}
    for override in overrides:
        values = merge(values, parse_override(override))
    folder = recipe.folder if recipe else _folder(deployment)
    with project(folder):
        after = build_recipe(name if recipe is None else recipe.name, values, f"deployment {name}", folder)
        before = build_recipe(name, {"flow": kind, **stored}, f"deployment {name}", folder)
    return before, after


def _changed(before: Recipe, after: Recipe) -> dict[str, Any]:
    """Return the sections in which two recipes differ, with the values of the second recipe.

    Each section is complete, because Prefect merges the parameters of a run and its deployment only at the top level.
    """
    old, new = before.dump(), after.dump()
    return {key: new.get(key) for key in {*new, *old} if new.get(key) != old.get(key)}


def _job_variables(
    client: SyncPrefectClient, deployment: DeploymentResponse, before: Recipe, after: Recipe, texts: Sequence[str]
) -> dict[str, Any]:
    """Return the job variables of a run that differ from the ones of its deployment.

    On Kubernetes they follow from the machine settings of the run. `texts`, the variables of the command line, replace
    them.

    Raises:
        ConfigurationError: the run needs GPUs that its deployment's work pool does not have, or a variable is invalid.
    """
    if pool_of(after) not in ("cpu", pool_of(before)):
        raise ConfigurationError(
            f"with these values the run needs the work pool {pool_of(after)!r}, and a run stays in the pool of its "
            f"deployment, {deployment.work_pool_name!r}",
            code="work_pool_mismatch",
            where="machine.servers.gpus, machine.trainer.gpus",
            remedy="write them to a recipe of your own (`armature show --toml`), and `armature deploy` it",
        )
    if deployment.work_pool_name is None:
        return {}
    pool = client.read_work_pool(deployment.work_pool_name)
    changed: dict[str, Any] = {}
    if pool.type == "kubernetes":
        old, new = (pod_variables(each, pool.base_job_template) for each in (before, after))
        changed = {key: value for key, value in new.items() if value != old[key]}
    return changed | parse_job_variables(texts, pool.base_job_template, pool.name)


def _folder(deployment: DeploymentResponse) -> Path | None:
    """Return the folder to which relative paths in the deployment's recipe refer; None for an installed recipe."""
    steps = [step.get(USE_PROJECT) for step in deployment.pull_steps or ()]
    return next((Path(step["folder"]) for step in steps if step), None)


def _refuse_without_worker(client: SyncPrefectClient, deployment: DeploymentResponse, url: str) -> None:
    """Check that a worker would take the run.

    Raises:
        ServerError: the work pool is paused, or no worker serves it.
    """
    from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus

    pool = deployment.work_pool_name
    if pool is None:
        return
    if client.read_work_pool(pool).is_paused:
        raise ServerError(
            f"the work pool {pool!r} is paused",
            code="work_pool_paused",
            where=url,
            remedy=f"prefect work-pool resume {pool}",
        )
    online = WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
    if not client.read_workers_for_work_pool(pool, online):
        raise ServerError(
            f"no worker serves the work pool {pool!r}, so the run would not start",
            code="work_pool_without_worker",
            where=url,
            remedy=f"start one: `armature up --pool {pool}`, or `prefect worker start --pool {pool}` on the machine "
            "that has what the recipe needs. `prefect deployment run` lets a run wait",
        )


def _watch(client: SyncPrefectClient, run: FlowRun) -> int:
    """Print the run's log and its changes of state until it has ended, and return the exit code."""
    previous, printed = "", 0
    while True:
        state = client.read_flow_run(run.id).state
        text = f"{state.name}{f': {state.message}' if state.message else ''}" if state else "Pending"
        printed = _print_logs(client, run, printed)
        if text != previous:
            print(f"{run.name}  {text}", flush=True)
            previous = text
        if state and state.is_final():
            _print_summary(client, run)
            return 0 if state.is_completed() else 1
        time.sleep(POLL_SECONDS)


def _print_logs(client: SyncPrefectClient, run: FlowRun, offset: int) -> int:
    """Print the run's log lines after the first `offset` ones, and return how many lines are printed in all."""
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    chosen = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
    while lines := client.read_logs(chosen, limit=LOGS_PER_CALL, offset=offset, sort=LogSort.TIMESTAMP_ASC):
        for line in lines:
            print(f"{line.timestamp:%H:%M:%S}  {line.message}", flush=True)
        offset += len(lines)
    return offset


def _print_summary(client: SyncPrefectClient, run: FlowRun) -> None:
    """Print the summary of a run: the same lines with which `armature run` ends."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

    chosen = ArtifactFilter(key=ArtifactFilterKey(any_=[SUMMARY]), flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
    for artifact in client.read_artifacts(artifact_filter=chosen):
        for line in str(artifact.data).splitlines():
            if line.startswith("- `"):
                print(line[3:-1], flush=True)
