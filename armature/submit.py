"""`armature submit`: a run of a deployment with changed values, on the platform's workers."""

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


# `armature submit --job-variable`: what a run asks for of the variables in a work pool's template of Jobs.


def parse_job_variables(texts: Sequence[str], template: Mapping[str, Any], pool: str) -> dict[str, Any]:
    """`key=value` or `key.entry=value` of each text, values as of `--set`.

    Args:
        template: of the work pool called `pool`.

    Raises:
        ConfigurationError: a text of another form, or a variable or value that the template does not have.
    """
    known = template.get("variables", {}).get("properties", {})
    given: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if not key.strip() or not value.strip():
            raise ConfigurationError(
                f"not a variable and its value: {text!r}",
                code="invalid_job_variable",
                remedy="write --job-variable key=value",
            )
        given = merge(given, parse_override(text))
    for key, value in given.items():
        if key not in known:
            raise ConfigurationError(
                f"{key!r} is not a variable of the template of Jobs",
                code="unknown_job_variable",
                where=f"--job-variable, work pool {pool!r}",
                remedy=suggestion(key, known) if known else "leave it out: this pool's runs have none",
            )
        if known[key].get("type") == "string" and isinstance(value, Written):
            given[key] = value.text
    if error := best_match(Draft202012Validator(template["variables"]).iter_errors(given)) if given else None:
        raise ConfigurationError(
            error.message,
            code="invalid_job_variable",
            where=f"--job-variable {'.'.join(map(str, error.absolute_path))}, work pool {pool!r}",
            remedy=known[error.absolute_path[0]].get("description", "") if error.absolute_path else "",
        )
    return given


POLL_SECONDS = 2.0
LOGS_PER_CALL = 200
SUMMARY = "summary"
"""Key of the artifact that tasks/reports.py makes."""


def submit(name: str, overrides: Sequence[str], watch: bool, job_variables: Sequence[str] = ()) -> int:
    """Start a run of the deployment `name`, or of that of a recipe's file, and print its name and page.

    Args:
        watch: print its log, and return when it has ended.
        job_variables: of the work pool's template, as `parse_job_variables` takes them.

    Returns:
        0; with `watch`, 1 if it did not complete.

    Raises:
        ConfigurationError: there is no such deployment, a value is wrong, or the run would need another work pool:
            nothing is started.
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
    """A client of the platform's API.

    Raises:
        ServerError: no platform is running here, and none is named.
    """
    if joined_api() is None:
        raise ServerError(
            "no platform is running here",
            code="platform_unknown",
            where=str(Path.cwd()),
            remedy="`armature up --detach`; or name the API of another: PREFECT_API_URL and PREFECT_API_AUTH_STRING",
        )
    os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")  # this process only asks
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def deploy_recipes(names: Sequence[str]) -> None:
    """Make the deployments of recipes on the platform, of all installed ones if none is named, and print their names.

    Raises:
        ConfigurationError: a recipe is invalid, or two would be one deployment.
        ServerError: Prefect's API does not answer.
    """
    with platform() as client:
        for name in deploy(client, names):
            print(name, flush=True)


def _deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """
    Raises:
        ConfigurationError: there is none; the nearest one is suggested.
    """
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(name)
    except (ObjectNotFound, ValueError) as error:  # a name without a slash is the second
        flows = {flow.id: flow.name for flow in client.read_flows()}
        known = [f"{flows.get(each.flow_id)}/{each.name}" for each in client.read_deployments()]
        raise ConfigurationError(
            f"no deployment is called {name!r}",
            code="unknown_deployment",
            where=str(client.api_url),
            remedy=f"{suggestion(name, known)}; `armature deploy` makes that of a recipe",
        ) from error


def _recipes(
    deployment: DeploymentResponse, name: str, recipe: Recipe | None, overrides: Sequence[str]
) -> tuple[Recipe, Recipe]:
    """That of the deployment, and that of the run.

    Raises:
        ConfigurationError: a value that `armature run --set` would refuse.
    """
    kind = next((kind for kind in RECIPES if deployment.entrypoint == RECIPES[kind].FLOW), None)
    if kind is None:
        raise ConfigurationError(
            "the deployment is not of a flow of ours",
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
    """The sections that differ, whole: Prefect merges parameters at the top level alone."""
    old, new = before.dump(), after.dump()
    return {key: new.get(key) for key in {*new, *old} if new.get(key) != old.get(key)}


def _job_variables(
    client: SyncPrefectClient, deployment: DeploymentResponse, before: Recipe, after: Recipe, given: Sequence[str]
) -> dict[str, Any]:
    """What the run's Job has other than the deployment's: for its machine on Kubernetes, and what is given.

    Raises:
        ConfigurationError: the run needs GPUs that its deployment's work pool is not for, or a variable is wrong.
    """
    if pool_of(after) not in ("cpu", pool_of(before)):
        raise ConfigurationError(
            f"with these values the run needs the work pool {pool_of(after)!r}, and a run stays in the pool of its "
            f"deployment, {deployment.work_pool_name!r}",
            code="work_pool_mismatch",
            where="machine.server_gpus, machine.trainer_gpus",
            remedy="write them to a recipe of your own (`armature show --toml`), and `armature deploy` it",
        )
    if deployment.work_pool_name is None:
        return {}
    pool = client.read_work_pool(deployment.work_pool_name)
    own: dict[str, Any] = {}
    if pool.type == "kubernetes":
        old, new = (pod_variables(each, pool.base_job_template) for each in (before, after))
        own = {key: value for key, value in new.items() if value != old[key]}
    return own | parse_job_variables(given, pool.base_job_template, pool.name)


def _folder(deployment: DeploymentResponse) -> Path | None:
    """That of a recipe outside the installation, which relative paths of its values begin at."""
    steps = [step.get(USE_PROJECT) for step in deployment.pull_steps or ()]
    return next((Path(step["folder"]) for step in steps if step), None)


def _refuse_without_worker(client: SyncPrefectClient, deployment: DeploymentResponse, url: str) -> None:
    """
    Raises:
        ServerError: the run would wait for a worker that is not there, or for a work pool that is paused.
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
    """Print the run's log until it has ended."""
    seen, printed = "", 0
    while True:
        found = client.read_flow_run(run.id)
        state = found.state
        said = f"{state.name}{f': {state.message}' if state.message else ''}" if state else "Pending"
        printed = _print_logs(client, run, printed)
        if said != seen:
            print(f"{run.name}  {said}", flush=True)
            seen = said
        if state and state.is_final():
            _print_summary(client, run)
            return 0 if state.is_completed() else 1
        time.sleep(POLL_SECONDS)


def _print_logs(client: SyncPrefectClient, run: FlowRun, offset: int) -> int:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    chosen = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
    while lines := client.read_logs(chosen, limit=LOGS_PER_CALL, offset=offset, sort=LogSort.TIMESTAMP_ASC):
        for line in lines:
            print(f"{line.timestamp:%H:%M:%S}  {line.message}", flush=True)
        offset += len(lines)
    return offset


def _print_summary(client: SyncPrefectClient, run: FlowRun) -> None:
    """What `armature run` ends with."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

    chosen = ArtifactFilter(key=ArtifactFilterKey(any_=[SUMMARY]), flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
    for artifact in client.read_artifacts(artifact_filter=chosen):
        for line in str(artifact.data).splitlines():
            if line.startswith("- `"):
                print(line[3:-1], flush=True)
