"""`armature check`: whether a recipe can run on this machine, before hours are spent on it."""

from __future__ import annotations

from typing import Any

from armature.hardware import gpu_count
from components.configuration import Recipe
from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.contracts.stages import StageContext
from components.stages import STAGES, TerminalEvents, ThreadUnits, fingerprint, open_store, run_stage

FIRST_STAGES = {"train-vlm": ("tasks", "model"), "train-vla": ("policy",)}
"""Stages of a flow that need nothing made before: they fail early where a model is not there."""


def check_recipe(recipe: Recipe, configuration_only: bool) -> None:
    """Print what was checked, in order of cost.

    Raises:
        ConfigurationError: the machine lacks what the recipe names.
        MismatchError: server and trainer do not agree.
    """
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    print(f"{recipe.name}: every value is valid")
    check_machine(machine, with_servers="inference" in recipe.sections)
    print("machine: what the recipe names is there")
    if configuration_only:
        return
    inputs = {name: run_stage(name, _settings(recipe, name), {}, machine) for name in FIRST_STAGES.get(recipe.flow, ())}
    if recipe.flow != "train-vlm":
        return
    from components.rl.check import check
    from components.rl.settings import TrainVLMSettings

    settings = recipe.settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    store, key = open_store(machine), f"check-{fingerprint(STAGES['train-vlm'], settings, inputs)}"
    workspace = store.workspace("train-vlm", key)
    check(settings, inputs, StageContext(machine, TerminalEvents(), ThreadUnits(), workspace, store.images, key))


def check_machine(machine: Machine, with_servers: bool) -> None:
    """
    Args:
        with_servers: Model servers are started, or joined.

    Raises:
        ConfigurationError: no interpreter with vLLM, a GPU that is not there, or a variable that is not set.
    """
    machine.server_variables(), machine.trainer_variables()
    if with_servers and not machine.endpoints and not machine.server_interpreter.exists():
        raise ConfigurationError(
            "no Python interpreter with vLLM to start servers with",
            where=f"machine.server_python = {machine.server_interpreter}",
            remedy="`armature setup`, or join running servers with --machine 'endpoints=[\"http://...\"]'",
        )
    named = {device for group in (*machine.server_gpus, machine.trainer_gpus) for device in group}
    if missing := sorted(device for device in named if device >= gpu_count()):
        raise ConfigurationError(
            f"GPU {missing[0]} is named, but this machine has {gpu_count()} GPUs",
            where="machine.server_gpus, machine.trainer_gpus",
            remedy="name devices that are there: --machine 'trainer_gpus=[0]'",
        )


def _settings(recipe: Recipe, stage: str) -> Any:
    return recipe.settings_for(STAGES[stage].settings)
