"""`armature check`: find out whether a recipe can run on this machine before hours are spent on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from armature import supervisor
from armature.components.configuration import Recipe, load_recipe, recipe_kind, recipe_names
from armature.components.configuration.recipes import SettingRow
from armature.components.configuration.stages import STAGES, open_store, run_stage
from armature.components.configuration.trackers import refuse_missing_trackers
from armature.components.contracts.cluster import Bundle, ClusterSettings
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Stage
from armature.components.machine.project import project
from armature.components.machine.resources import gpu_count
from armature.components.vlm.settings import TrainerSettings
from armature.deployments import gpus_and_memory, pool_of


def check_recipe(recipe: Recipe, configuration_only: bool, gpu: str | None = None, with_settings: bool = False) -> None:
    """Check a recipe, cheap checks first, and print each result.

    Args:
        configuration_only: check settings and the machine, and run no stage.
        gpu: compare the memory that the recipe needs with this GPU's, see `gpu_memory`; None: with this machine's GPUs.
            A machine without a GPU is then not checked.
        with_settings: also check that the settings of the recipe act.

    Raises:
        ConfigurationError: the machine lacks something that the recipe names, or a setting does not act.
        MismatchError: server and trainer compute different log-probs.
    """
    with project(recipe.folder):
        _check(recipe, configuration_only, gpu, with_settings)


def _check(recipe: Recipe, configuration_only: bool, gpu: str | None, with_settings: bool) -> None:
    """Do the work of `check_recipe`, within the recipe's project."""
    print(f"{recipe.name}: every value is valid")
    recipe.values.refuse_sources()
    if gpu is not None or not configuration_only:  # before the machine is checked: an estimate needs no GPU
        from armature.plan import memory_lines  # imports torch

        for line in memory_lines(recipe, gpu):
            print(line)
    if gpu is not None and not gpu_count():
        recipe.values.refuse_ahead()
        print("machine: not checked, because --gpu names a GPU that it does not have")
        return
    machine = check_ahead(recipe)
    print("machine: what the recipe names is there")
    if machine.cluster:
        _say_room(machine, machine.cluster)
    first = {name: _resolved(recipe, name) for name in recipe.values.FIRST_STAGES}
    pool, platform = pool_of(recipe), supervisor.current()
    if platform is not None and pool not in platform.pools:
        print(f"platform: no worker serves the pool {pool!r} of its deployment: armature up --pool {pool}")
    if recipe.flow == "train-vlm" and machine.trainer.gpus:
        for line in share_of_gpus(recipe, machine):
            print(line)
    if configuration_only:
        print("the data and the model: not read; leave out --configuration-only")
        return
    inputs = {name: run_stage(name, settings, {}, machine) for name, settings in first.items()}
    if not with_settings:
        recipe.values.check_stages(inputs, print)
        return
    rows = recipe.values.check_settings(inputs, print)
    for line in setting_lines(rows):
        print(line)
    if idle := [row.setting for row in rows if row.acts is False]:
        raise ConfigurationError(
            f"{len(idle)} settings do not act as expected",
            code="setting_does_not_act",
            where=", ".join(idle),
            remedy="compare what the table above expects with what was observed",
        )


def setting_lines(rows: Sequence[SettingRow]) -> list[str]:
    """Return a table with the results of the settings' checks."""
    marks = {True: "✓", False: "✗", None: "-"}
    table = [("", "setting", "expectation", "observed")]
    table += [(marks[row.acts], row.setting, row.expectation, row.observed) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def share_of_gpus(recipe: Recipe, machine: Machine) -> list[str]:
    """Return lines about the best division of GPUs between servers and trainer.

    It is computed from the times that the last finished run of the recipe measured.
    """
    from armature.components.planning.balance import last_run, share_lines
    from armature.components.rl.settings import TrainVLMSettings

    if set(machine.trainer.gpus) & set(machine.started_server_gpus):
        return ["share of GPUs: servers and trainer take turns on the same ones, so there is nothing to divide"]
    settings, store = recipe.settings_for(TrainVLMSettings), open_store(machine)
    if (measured := last_run(settings, store)) is None:
        return [
            f"share of GPUs: {store.root} has no finished run of this recipe; after one, this says which share of them "
            f"would have been faster. Until then `armature plan {recipe.name}` computes it from data sheets"
        ]
    return share_lines(measured, max((len(each) for each in machine.servers.gpus), default=1))


def check_ahead(recipe: Recipe) -> Machine:
    """Find errors that would end a run minutes later, without starting anything, and return the recipe's machine.

    It is called within the recipe's project, so that relative paths are resolved.

    Raises:
        ConfigurationError: the machine lacks something that the recipe names, a hub name has no revision, or LIBERO has
            no such task.
        DataError: the model folder does not exist.
    """
    machine, trainer = recipe.machine, recipe.sections.get("trainer")
    _refuse_without_gpu(recipe)
    check_machine(machine, with_servers="inference" in recipe.sections)
    recipe.values.refuse_sources()
    if isinstance(trainer, TrainerSettings) and trainer.logprobs.name == "triton":
        _check_triton(machine)
    recipe.values.refuse_ahead()
    return machine


def _refuse_without_gpu(recipe: Recipe) -> None:
    """Raise ConfigurationError if the recipe needs a GPU and this machine has none.

    The error names an installed recipe of the same kind whose sources are here, with the same environment and family
    of policies if there is one.
    """
    named, (_, gib) = {*recipe.machine.started_server_gpus, *recipe.machine.trainer.gpus}, gpus_and_memory(recipe)
    if gpu_count() or not named:
        return
    others = [load_recipe(name) for name in recipe_names() if recipe_kind(name) == recipe.kind]
    runnable = [each for each in others if not gpus_and_memory(each)[0] and _has_sources(each)]
    nearest = max(runnable, key=lambda each: _subject(each) == _subject(recipe), default=None)
    size = f" of {gib} GiB" if gib else ""
    raise ConfigurationError(
        f"the recipe needs {len(named)} GPU{'s' * (len(named) > 1)}{size}, and this machine has none",
        code="gpu_missing",
        where="machine.servers.gpus, machine.trainer.gpus",
        remedy=(f"the nearest recipe that runs here: armature run {nearest.name}" if nearest else "armature list")
        + f"; whether a GPU holds the other one: armature check {recipe.name} --gpu {gib or 80}GiB",
    )


def _has_sources(recipe: Recipe) -> bool:
    """Return whether the folders of a recipe's model and datasets are here; a hub name with a revision counts."""
    try:
        recipe.values.refuse_sources()
    except ArmatureError:
        return False
    return True


def _subject(recipe: Recipe) -> tuple[str | None, str | None]:
    """Return the name of a recipe's environment and the family of its policy; None for what it does not have."""
    environment, policy = recipe.sections.get("environment"), recipe.sections.get("policy")
    return getattr(environment, "name", None), getattr(policy, "family", None)


def _check_triton(machine: Machine) -> None:
    """Raise ConfigurationError if the Triton kernels cannot run: they need a GPU, or Triton's interpreter."""
    if not machine.gpus_of_trainer and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigurationError(
            "the Triton kernels need a CUDA device, and no GPU is named for the trainer",
            code="triton_needs_cuda",
            where='trainer.logprobs.name = "triton", machine.trainer.gpus = []',
            remedy="--set trainer.logprobs.name=torch, or name GPUs: --machine 'trainer.gpus=[0]'",
        )


def _say_room(machine: Machine, cluster: ClusterSettings) -> None:
    """Print how many workers, servers and trainer nodes the cluster has room for, and how many the settings ask for."""
    from armature.components.machine.workers.actor import room  # Ray is an extra

    def print_room(placed: ClusterSettings | Bundle, what: str, counts: Mapping[str, int]) -> None:
        fits = room(cluster.address, placed.resources_of_node())
        asked = ", ".join(f"{name} asks for {count}" for name, count in counts.items())
        print(f"cluster: {len(fits)} nodes with room for {sum(fits.values())} {what}, {asked}")

    if any((workers := machine.workers.model_dump()).values()):
        print_room(cluster, "workers", {f"workers.{name}": count for name, count in workers.items()})
    if cluster.servers is not None:
        print_room(cluster.servers, "model servers", {"servers.count": machine.servers.count})
    if cluster.trainer is not None:
        print_room(cluster.trainer, "nodes of trainer ranks", {"trainer.nodes": machine.trainer.nodes})


def check_machine(machine: Machine, with_servers: bool) -> None:
    """Check that this machine has the GPUs, environment variables and interpreter that its settings name.

    Args:
        with_servers: the run starts model servers or joins some.

    Raises:
        ConfigurationError: a GPU does not exist, a variable is not set, a tracker's package is missing, or no
            interpreter has vLLM.
    """
    machine.server_variables(), machine.trainer_variables()
    refuse_missing_trackers(machine.report_to)
    if machine.cluster:
        from armature.components.machine.workers.actor import joined  # Ray is an extra

        joined(machine.cluster.address)
    named = {*machine.started_server_gpus, *machine.trainer.gpus}
    if missing := sorted(device for device in named if device >= gpu_count()):
        raise ConfigurationError(
            f"GPU {missing[0]} is named, but there are {gpu_count()} GPUs, counted from 0",
            code="gpu_missing",
            where="machine.servers.gpus, machine.trainer.gpus",
            remedy="name devices that are there: --machine 'trainer.gpus=[0]'",
        )
    starts = not machine.joins_servers and machine.server_bundle is None  # on a cluster, each node checks its own
    if with_servers and starts and not _has_vllm(machine.server_interpreter):
        raise ConfigurationError(
            "no Python interpreter with vLLM to start servers with",
            code="interpreter_without_vllm",
            where=f"machine.servers.python = {machine.server_interpreter}",
            remedy="make one: `armature setup`, in a clone also `make environments`; or join running servers: "
            "--machine 'servers.endpoints=[\"http://...\"]'",
        )


def _has_vllm(python: Path) -> bool:
    """Check that the Python interpreter runs and can import vLLM."""
    find = "import sys; from importlib.util import find_spec; sys.exit(find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", find], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _resolved(recipe: Recipe, name: str) -> BaseModel:
    """Return the settings of stage `name`, which has no inputs, with branches and tags replaced by commits.

    Each replacement is printed.
    """
    stage: Stage[Any] = STAGES[name]
    return stage.resolve(recipe.settings_for(stage.settings), {}, print)
