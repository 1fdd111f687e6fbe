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
    "alfworld-games": "flows.alfworld_games.alfworld_games",
    "quantile-stats": "flows.quantile_stats.quantile_stats",
    "train-vlm": "flows.train_vlm.train_vlm",
    "evaluate": "flows.evaluate.evaluate",
    "evaluate/sweep": "flows.sweep.sweep",
    "demonstrations": "flows.demonstrations.demonstrations",
    "train-vla": "flows.train_vla.train_vla",
    "evaluate/libero": "flows.evaluate_libero.evaluate_libero",
}
"""A recipe's flow: by its whole name, else by the part before the slash.

As modules, not files: a worker finds them in a checkout and in an installed wheel alike.
"""

_HEADER = """\
# Written by `armature deployments write` from configs/<flow>/<deployment>.toml: change those, not this.
# ARMATURE_HOME is the folder on the worker's machine that runs stand in, ARMATURE_VERSION the package's version and
# commit; `armature up` sets both.
"""


def entrypoint(name: str) -> str:
    return FLOWS.get(name) or FLOWS[name.partition("/")[0]]


def flow_of(name: str) -> Any:
    """The Prefect flow that runs recipe `name`; importing it takes seconds."""
    module, _, attribute = entrypoint(name).rpartition(".")
    return getattr(import_module(module), attribute)


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
                "parameters": {name: values for name, values in recipe.dump().items() if not _is_default(name, values)},
                "work_pool": {"name": pool_of(recipe)},
            }
        )
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $ARMATURE_HOME }}"}}]
    return {"name": "armature", "pull": pull, "deployments": deployments}


def _is_default(section: str, values: Any) -> bool:
    """Whether a flow takes the same without being told."""
    return section == "machine" and values == Machine().model_dump(mode="json")


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
