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
"""Prefect's work pools: for recipes without GPUs, with GPUs for servers only, and with GPUs for the trainer."""

USE_PROJECT = "armature.components.machine.project.use_project"
SET_WORKING_DIRECTORY = "prefect.deployments.steps.set_working_directory"
TRAINER_GIB, SERVER_GIB = 96, 24
"""Main memory in GiB that a job gets for each GPU of the trainer, and for each GPU of a server."""
HOME = "ARMATURE_HOME"
"""Environment variable with the working folder of runs. If it is not set when a deployment is created, each worker uses
the value of its own environment."""


def flow_of(kind: str) -> Any:
    """Import and return the Prefect flow of a kind of recipe (a key of `RECIPES`). The import takes seconds."""
    return resolve_name(RECIPES[kind].FLOW)


def pool_of(recipe: Recipe) -> str:
    """Return the name of the work pool for a recipe. It depends on the GPUs that the machine section names."""
    machine = recipe.machine
    if machine.trainer.gpus:
        return "train-gpu"
    return "vllm-gpu" if machine.started_server_gpus else "cpu"


def gpus_and_memory(recipe: Recipe) -> tuple[int, int | None]:
    """Return how many GPUs a recipe needs, and the GiB of each one if the recipe says it."""
    return job_variables(recipe.machine)["gpus"], recipe.gpu_gib


def machine_that_resumes(recipe: Recipe) -> Machine:
    """Return the machine section of a recipe that runs as a job, which a cluster may start more than once.

    Raises:
        ConfigurationError: `machine.force` names stages, which each restart would make again from the beginning.
    """
    machine = recipe.machine
    if machine.force:
        raise ConfigurationError(
            "a restarted job would make these stages again from the beginning",
            code="force_in_job",
            where=f"machine.force = {', '.join(machine.force)}",
            remedy="leave it out",
        )
    return machine


def job_variables(machine: Machine) -> dict[str, Any]:
    """Return the GPUs, CPUs and memory that a Kubernetes pod or a SLURM node needs for these machine settings.

    A pod sees its GPUs as 0, 1, ..., so it needs all GPUs up to the highest number that the settings name. Memory is
    16 GiB for the flow and its environments, 96 GiB for each trainer GPU (a checkpoint is copied before it is written)
    and 24 GiB for each GPU of a server that the run starts.
    """
    servers = machine.started_server_gpus
    gpus = max({*servers, *machine.trainer.gpus}, default=-1) + 1
    memory = 16 + TRAINER_GIB * len(machine.trainer.gpus) + SERVER_GIB * len(servers)
    # Environment workers and statistics workers never run at the same time, so the larger number counts.
    workers = 0 if machine.cluster else max(machine.workers.environments, machine.workers.statistics)
    return {"gpus": gpus, "cpus": str(2 + 4 * gpus + workers), "memory": f"{memory}Gi"}


def pod_variables(recipe: Recipe, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job variables of a Kubernetes pod for a recipe: its resources and its container image.

    The resources are `job_variables`. The image contains vLLM if the recipe starts model servers.

    Args:
        template: base job template of the work pool (infra/kubernetes/base/job-template.json, filled in by
            provisioning).

    Raises:
        ConfigurationError: the template does not name the two images.
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
    """Return the arguments of Prefect's `create_deployment` for a recipe, without name, flow and version.

    Args:
        template: base job template of a Kubernetes work pool; the deployment then gets the recipe's `pod_variables`.
    """
    parameters = recipe.dump()
    if parameters.get("machine") == Machine().model_dump(mode="json"):
        del parameters["machine"]  # the flow has this default
    steps: list[dict[str, Any]] = [{SET_WORKING_DIRECTORY: {"directory": os.environ.get(HOME, f"{{{{ ${HOME} }}}}")}}]
    if recipe.folder is not None:
        folder = Path(os.path.relpath(recipe.folder)).as_posix()  # relative to the working folder of runs
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
    """Create or update one deployment for each recipe.

    `names` are recipe names or files. If it is empty, all installed recipes get a deployment.

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
    """Return, for each work pool that is not in `pools`, how many recipes need it.

    Such a pool has no worker here. `names` are recipe names or files; if it is empty, all installed recipes are
    counted.
    """
    needed = Counter(pool_of(load_recipe(name)) for name in names or recipe_names())
    return {pool: count for pool, count in needed.items() if pool not in pools}
