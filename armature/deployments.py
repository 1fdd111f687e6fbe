"""Deployments: `armature up` creates one for each installed recipe, `armature deploy` one for each recipe it names.

Prefect's client creates them; the command `prefect deploy` is slower and needs a file that repeats the recipes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from armature.components.configuration import Recipe, load_recipe, recipe_names
from armature.components.configuration.recipes import RECIPES
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import package_version
from armature.components.contracts.machine import Machine

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

POOLS = ("cpu", "vllm-gpu", "train-gpu")

USE_PROJECT = "armature.components.machine.project.use_project"
SET_WORKING_DIRECTORY = "prefect.deployments.steps.set_working_directory"
TRAINER_GIB, SERVER_GIB = 96, 24
"""Memory of the machine for each GPU of the trainer and of a server."""
HOME = "ARMATURE_HOME"
"""Variable with the working folder of runs. If it is not set here, each worker uses its own value."""


def flow_of(kind: str) -> Any:
    """The Prefect flow of a kind of recipe; importing it takes seconds."""
    return resolve_name(RECIPES[kind].FLOW)


def pool_of(recipe: Recipe) -> str:
    """The work pool by what the machine section asks for."""
    machine = recipe.machine
    if machine.trainer_gpus:
        return "train-gpu"
    return "vllm-gpu" if machine.started_server_gpus else "cpu"


def machine_that_resumes(recipe: Recipe) -> Machine:
    """The machine of a job that a cluster may start more than once.

    Raises:
        ConfigurationError: it forces stages.
    """
    machine = recipe.machine
    if machine.force:
        raise ConfigurationError(
            "a job that is taken up again would make these stages from their beginning again",
            code="force_in_job",
            where=f"machine.force = {', '.join(machine.force)}",
            remedy="leave it out",
        )
    return machine


def job_variables(machine: Machine) -> dict[str, Any]:
    """What a pod of Kubernetes, or a node of SLURM, needs to be this machine.

    A pod sees its GPUs as 0, 1, ...: it needs all up to the highest that is named. Memory is 16 GiB for the flow and
    its environments, 96 GiB for each GPU of the trainer, whose checkpoint is copied before it is written, and 24 GiB
    for each of a server that the run starts.
    """
    servers = machine.started_server_gpus
    gpus = max({*servers, *machine.trainer_gpus}, default=-1) + 1
    memory = 16 + TRAINER_GIB * len(machine.trainer_gpus) + SERVER_GIB * len(servers)
    # The workers of an environment and of statistics run one after the other.
    workers = 0 if machine.cluster else max(machine.environment_processes, machine.statistics_workers)
    return {"gpus": gpus, "cpus": str(2 + 4 * gpus + workers), "memory": f"{memory}Gi"}


def pod_variables(recipe: Recipe, template: Mapping[str, Any]) -> dict[str, Any]:
    """`job_variables`, and the image that has what the recipe starts.

    Args:
        template: of the work pool, infra/kubernetes/base/job-template.json as provisioning has filled it in.

    Raises:
        ConfigurationError: the template is another one.
    """
    try:
        flows, standalone = template["variables"]["properties"]["image"]["enum"]
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            "the template of the work pool does not name the two images of runs",
            code="images_not_named",
            where=f"work pool {pool_of(recipe)!r}",
            remedy="provision the platform again: kubectl apply -k",
        ) from error
    machine = recipe.machine
    starts_servers = "inference" in recipe.sections and not machine.joins_servers
    return {**job_variables(machine), "image": standalone if starts_servers else flows}


def deployment(recipe: Recipe, template: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what Prefect's `create_deployment` needs for a recipe, except the name, the flow and the version.

    Args:
        template: base job template of a Kubernetes work pool; the deployment then gets the recipe's `pod_variables`.
    """
    parameters = recipe.dump()
    if parameters.get("machine") == Machine().model_dump(mode="json"):
        del parameters["machine"]  # the flow has this default
    steps: list[dict[str, Any]] = [{SET_WORKING_DIRECTORY: {"directory": os.environ.get(HOME, f"{{{{ ${HOME} }}}}")}}]
    if recipe.folder is not None:
        folder = Path(os.path.relpath(recipe.folder)).as_posix()  # from the folder of runs, where this is called
        steps.append({USE_PROJECT: {"folder": folder}})
    return {
        "description": recipe.description,
        "tags": [recipe.flow],
        "entrypoint": recipe.values.FLOW,
        "parameters": parameters,
        "work_pool_name": pool_of(recipe),
        "job_variables": {} if template is None else pod_variables(recipe, template),
        "pull_steps": steps,
    }


def deploy(client: SyncPrefectClient, names: Sequence[str] = ()) -> list[str]:
    """Create the deployments of these recipes, names or files, or renew them; of all installed ones if none is named.

    Returns:
        The names of the deployments.

    Raises:
        ConfigurationError: two recipes would be one deployment. Nothing is created.
    """
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.exceptions import ObjectNotFound

    recipes = [load_recipe(name) for name in names or recipe_names()]
    name, times = Counter(recipe.name for recipe in recipes).most_common(1)[0]
    if times > 1:
        raise ConfigurationError(
            f"{times} recipes are called {name!r}", code="recipe_name_taken", remedy="give their files different names"
        )
    version = package_version()
    pools = {name: client.read_work_pool(name) for name in {pool_of(recipe) for recipe in recipes}}
    for recipe in recipes:
        pool, flow = pools[pool_of(recipe)], flow_of(recipe.kind)
        values = deployment(recipe, pool.base_job_template if pool.type == "kubernetes" else None) | {
            "version": version,
            "parameter_openapi_schema": flow.parameters.model_dump(),
            "enforce_parameter_schema": True,
        }
        try:  # creating it again would delete the schedules that a user gave it
            existing = client.read_deployment_by_name(recipe.name)
            client.update_deployment(existing.id, DeploymentUpdate(**values))
        except ObjectNotFound:
            client.create_deployment(client.create_flow(flow), name=recipe.name.partition("/")[2], **values)
    return [recipe.name for recipe in recipes]


def without_worker(pools: Collection[str], names: Sequence[str] = ()) -> dict[str, int]:
    """Number of recipes by work pool, for the work pools of these recipes that are not among `pools`."""
    needed = Counter(pool_of(load_recipe(name)) for name in names or recipe_names())
    return {pool: count for pool, count in needed.items() if pool not in pools}
