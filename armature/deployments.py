"""`prefect.yaml`: one deployment per recipe, written from `configs/` and compared with it by a test."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from components.configuration import Recipe, load_recipe, recipe_names
from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine

FILE = Path("prefect.yaml")
POOLS = ("cpu", "vllm-gpu", "train-gpu")

FLOWS = {
    "alfworld-games": "flows/alfworld_games.py:alfworld_games",
    "quantile-stats": "flows/quantile_stats.py:quantile_stats",
    "train-vlm": "flows/train_vlm.py:train_vlm",
    "evaluate": "flows/evaluate.py:evaluate",
    "evaluate/sweep": "flows/sweep.py:sweep",
    "demonstrations": "flows/demonstrations.py:demonstrations",
    "train-vla": "flows/train_vla.py:train_vla",
    "evaluate/libero": "flows/evaluate_libero.py:evaluate_libero",
}
"""A recipe's flow: by its whole name, else by the part before the slash."""

_HEADER = """\
# Written by `armature deployments write` from configs/<flow>/<deployment>.toml: change those, not this.
# ARMATURE_HOME is the checkout on the worker's machine, ARMATURE_VERSION the package's version and commit;
# `armature up` sets both.
"""


def entrypoint(name: str) -> str:
    return FLOWS.get(name) or FLOWS[name.partition("/")[0]]


def flow_of(name: str) -> Any:
    """The Prefect flow that runs recipe `name`; importing it takes seconds."""
    file, _, attribute = entrypoint(name).partition(":")
    return getattr(import_module(file.removesuffix(".py").replace("/", ".")), attribute)


def pool_of(recipe: Recipe) -> str:
    """The work pool by what the machine section asks for."""
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    if machine.trainer_gpus:
        return "train-gpu"
    return "vllm-gpu" if machine.server_gpus else "cpu"


def document() -> dict[str, Any]:
    """The content of `prefect.yaml` for the recipes as they are."""
    deployments = []
    for name in recipe_names():
        recipe = load_recipe(name)
        deployments.append(
            {
                "name": name.partition("/")[2],
                "version": "{{ $ARMATURE_VERSION }}",
                "description": recipe.description,
                "tags": [recipe.flow],
                "entrypoint": entrypoint(name),
                "parameters": recipe.dump(),
                "work_pool": {"name": pool_of(recipe)},
            }
        )
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $ARMATURE_HOME }}"}}]
    return {"name": "armature", "pull": pull, "deployments": deployments}


def text() -> str:
    return _HEADER + yaml.safe_dump(document(), sort_keys=False, width=110, allow_unicode=True)


def write(file: Path = FILE) -> None:
    file.write_text(text())


def check(file: Path = FILE) -> None:
    """
    Raises:
        ConfigurationError: the file does not say what the recipes say.
    """
    if not file.exists() or file.read_text() != text():
        raise ConfigurationError(
            "prefect.yaml does not fit the recipes in configs/", where=str(file), remedy="armature deployments write"
        )
