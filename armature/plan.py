"""`armature plan`, and the memory estimate of `armature check`, for GPUs that this machine need not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import psutil
import torch

from armature.components.configuration import Recipe, parse_override
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.machine.project import project
from armature.components.planning.memory import GPUS, RecipeMemory, gpu_memory, gpu_named
from armature.components.planning.step import Plan


def memory_lines(recipe: Recipe, gpu: str | None) -> list[str]:
    """Return lines that say how much memory the recipe needs and whether it fits on the GPUs.

    The memory is compared with the GPU called `gpu`. If `gpu` is None, it is compared with this machine's GPUs, or with
    common GPU sizes if this machine lacks the GPUs that the recipe names. The list is empty for a recipe without a
    trainer and a policy.

    Raises:
        ConfigurationError: the GPU is unknown.
    """
    size = gpu_memory(gpu) if gpu is not None else None  # a wrong name is an error even if the memory is unknown
    try:
        memory = memory_of(recipe)
    except ArmatureError as error:  # not fatal here: the check of the model itself raises it again
        return [f"memory: unknown, {error.what}" + f"; {error.remedy}" * bool(error.remedy)]
    if memory is None:
        return []
    machine, gpus = recipe.machine, recipe.machine.gpus_of_trainer
    if size is not None:
        return replace(memory, on_gpu=True).lines(size, f"an {gpu}" if gpu in GPUS else "a GPU")
    if not memory.on_gpu:
        return memory.lines(psutil.virtual_memory().available, "this machine, which are free")
    if torch.cuda.is_available() and max(gpus) < torch.cuda.device_count() and not machine.trainer_bundle:
        return memory.lines(torch.cuda.get_device_properties(gpus[0]).total_memory, f"GPU {gpus[0]}")
    return memory.lines(None, "")


def memory_of(recipe: Recipe) -> RecipeMemory | None:
    """Return the memory estimate of a recipe, or None for a flow without a trainer and a policy.

    Raises:
        DataError: the model's configuration cannot be read.
    """
    memory: RecipeMemory | None = resolve_name(recipe.values.MEMORY)(recipe.values) if recipe.values.MEMORY else None
    return memory


def plan_recipe(recipe: Recipe, gpus: Sequence[int], gpu: str, changes: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table with a row for each number of GPUs, and below it the assumptions.

    A row has the time of a training step, the memory per GPU and the bottleneck.

    Args:
        gpus: numbers of GPUs; empty: those that the recipe's planner chooses.
        gpu: name of the GPU.
        changes: assumptions to change as `name=value`, for example the length of episodes.

    Raises:
        ConfigurationError: the recipe has no rollouts, the GPU or an assumption is unknown, or the model does not fit.
        DataError: the model's configuration cannot be read.
    """
    values: dict[str, Any] = {}
    for each in changes:
        values |= parse_override(each)
    if not recipe.values.PLAN:
        raise ConfigurationError(
            f"{recipe.flow} has no rollouts, so there is no step to plan",
            code="nothing_to_plan",
            where=recipe.name,
            remedy="give a recipe of train-vlm or train-vla-rl; `armature check` reports the memory of any",
        )
    sheet = gpu_named(gpu)
    with project(recipe.folder):
        plan: Plan = resolve_name(recipe.values.PLAN)(recipe.values, gpus, sheet, values)
    assumed, title, rows = plan
    yield f"{recipe.name} on {sheet.name}: {title}"
    yield ""
    yield from _table(rows)
    yield ""
    yield f"computed from the sizes of the model, the {sheet.source}, and (change one: --assume NAME=VALUE)"
    for name, value in assumed:
        number = str(value) if isinstance(value, bool) else f"{value:.3g}"
        yield f"  {name:<24} {number:>10}  {type(assumed).model_fields[name].description}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a table as lines of text. All columns are aligned to the right, except the last one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, last in rows:
        yield "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)), last]).rstrip()
