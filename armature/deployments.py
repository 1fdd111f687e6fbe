"""`prefect.yaml`: one deployment per recipe, written from the recipes and compared with them by a test."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from armature.components.configuration import Recipe, load_recipe, recipe_names
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine

FILE = Path("prefect.yaml")
POOLS = ("cpu", "vllm-gpu", "train-gpu")

FLOWS = {
    "alfworld-games": "armature.flows.alfworld_games.alfworld_games",
    "quantile-stats": "armature.flows.quantile_stats.quantile_stats",
    "train-vlm": "armature.flows.train_vlm.train_vlm",
    "evaluate": "armature.flows.evaluate.evaluate",
    "evaluate/sweep": "armature.flows.sweep.sweep",
    "demonstrations": "armature.flows.demonstrations.demonstrations",
    "train-vla": "armature.flows.train_vla.train_vla",
    "train-vla-rl": "armature.flows.train_vla_rl.train_vla_rl",
    "evaluate/libero": "armature.flows.evaluate_libero.evaluate_libero",
    "evaluate/libero-perturbed": "armature.flows.evaluate_libero.evaluate_libero",
}
"""The flow of each kind of recipe.

As modules, not files: a worker finds them in a checkout and in an installed wheel alike.
"""

IN_THE_FOLDER_OF_RUNS = {"prefect.deployments.steps.set_working_directory": {"directory": "{{ $ARMATURE_HOME }}"}}

_HEADER = """\
# Written by `armature deployments write` from the recipes: change those, not this.
# ARMATURE_HOME is the folder on the worker's machine that runs stand in, ARMATURE_VERSION the package's version and
# commit; `armature up` sets both.
"""


def flow_of(kind: str) -> Any:
    """The Prefect flow of a kind of recipe; importing it takes seconds."""
    module, _, attribute = FLOWS[kind].rpartition(".")
    return getattr(import_module(module), attribute)


def pool_of(recipe: Recipe) -> str:
    """The work pool by what the machine section asks for."""
    machine = machine_of(recipe)
    if machine.trainer_gpus:
        return "train-gpu"
    return "vllm-gpu" if machine.started_server_gpus else "cpu"


def machine_of(recipe: Recipe) -> Machine:
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    return machine


def machine_that_resumes(recipe: Recipe) -> Machine:
    """The machine of a job that a cluster may start more than once.

    Raises:
        ConfigurationError: it forces stages.
    """
    machine = machine_of(recipe)
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
    memory = 16 + 96 * len(machine.trainer_gpus) + 24 * len(servers)
    workers = max(machine.environment_processes, machine.statistics_workers)  # one after the other
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
    machine = machine_of(recipe)
    starts_servers = "inference" in recipe.sections and not machine.joins_servers
    return {**job_variables(machine), "image": standalone if starts_servers else flows}


def document(names: Sequence[str] = (), template: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of `prefect.yaml` for these recipes, names or files, as they are; for all installed ones if none is.

    Args:
        template: of work pools of Kubernetes, for which each deployment gets its `pod_variables`.

    Raises:
        ConfigurationError: two recipes would be one deployment.
    """
    recipes = [load_recipe(name) for name in names or recipe_names()]
    name, times = Counter(recipe.name for recipe in recipes).most_common(1)[0]
    if times > 1:
        raise ConfigurationError(
            f"{times} recipes are called {name!r}", code="recipe_name_taken", remedy="give their files different names"
        )
    deployments = [_deployment(each) for each in recipes]
    for recipe, deployment in zip(recipes, deployments, strict=True):
        if template is not None:
            deployment["work_pool"]["job_variables"] = pod_variables(recipe, template)
    return {"name": "armature", "pull": [IN_THE_FOLDER_OF_RUNS], "deployments": deployments}


def _deployment(recipe: Recipe) -> dict[str, Any]:
    described = {
        "name": recipe.name.partition("/")[2],
        "version": "{{ $ARMATURE_VERSION }}",
        "description": recipe.description,
        "tags": [recipe.flow],
        "entrypoint": FLOWS[recipe.kind],
        "parameters": {name: values for name, values in recipe.dump().items() if not _is_default(name, values)},
        "work_pool": {"name": pool_of(recipe)},
    }
    if recipe.folder is None:
        return described
    folder = Path(os.path.relpath(recipe.folder)).as_posix()  # from that of the runs, where prefect.yaml is written
    return described | {
        "pull": [IN_THE_FOLDER_OF_RUNS, {"armature.components.project.use_project": {"folder": folder}}]
    }


def without_worker(pools: Iterable[str], file: Path = FILE) -> dict[str, int]:
    """The work pools of a file's deployments that are not among `pools`, and how many deployments each has."""
    document = yaml.load(file.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    named = [each["work_pool"]["name"] for each in document["deployments"] if each.get("work_pool")]
    return dict(Counter(name for name in named if name not in pools))


def _is_default(section: str, values: Any) -> bool:
    """Whether a flow takes the same without being told."""
    return section == "machine" and values == Machine().model_dump(mode="json")


def text(names: Sequence[str] = (), template: Mapping[str, Any] | None = None) -> str:
    return _HEADER + yaml.safe_dump(document(names, template), sort_keys=False, width=110, allow_unicode=True)


def write(file: Path = FILE, names: Sequence[str] = (), template: Mapping[str, Any] | None = None) -> None:
    file.write_text(text(names, template))


def check(file: Path = FILE, names: Sequence[str] = ()) -> None:
    """
    Raises:
        ConfigurationError: the file does not say what the recipes say.
    """
    if not file.exists() or file.read_text() != text(names):
        remedy = " ".join(["armature deployments write", *names])
        raise ConfigurationError(
            "prefect.yaml does not fit the recipes", code="deployments_outdated", where=str(file), remedy=remedy
        )
