"""`armature plan`, and the memory that `armature check` reports: of a recipe, on GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import psutil
import torch
from pydantic import ValidationError

from armature.components.configuration import Recipe, explain, parse_override
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.libero.settings import SimulatorSettings
from armature.components.evaluation.libero.settings import LiberoEvaluationSettings
from armature.components.planning.memory import Gpu, RecipeMemory, gpu_named, language_memory, sizes_of
from armature.components.planning.step import Assumptions, LanguagePlan, StepTime
from armature.components.policies.settings import RobotPolicySettings
from armature.components.project import project
from armature.components.rl.settings import TrainVLMSettings
from armature.components.rollouts.settings import RolloutSettings
from armature.components.vla.settings import VLATrainerSettings
from armature.components.vla_rl.settings import RobotRolloutSettings, TrainVLARLSettings
from armature.components.vlm.memory import GIB

SIZES, ROBOT_SIZES = (8, 64, 512), (1, 8)
SettingsT = TypeVar("SettingsT", bound=Settings)


def memory_lines(recipe: Recipe, gpu: str | None) -> list[str]:
    """Return lines that say how much memory the recipe needs and whether the GPUs have it.

    The GPUs are of the kind `gpu`, else this machine's, else of common sizes. A recipe without a trainer and a policy
    gives no lines.
    """
    try:
        memory = memory_of(recipe)
    except ArmatureError as error:  # the check goes on, and says it again where it matters
        return [f"memory: unknown, {error.what}" + f"; {error.remedy}" * bool(error.remedy)]
    if memory is None:
        return []
    machine, gpus = _machine(recipe), _machine(recipe).gpus_of_trainer
    if gpu is not None:
        return replace(memory, on_gpu=True).lines(gpu_named(gpu).memory, f"an {gpu}")
    if not memory.on_gpu:
        return memory.lines(psutil.virtual_memory().available, "this machine, which are free")
    if torch.cuda.is_available() and max(gpus) < torch.cuda.device_count() and not machine.trainer_bundle:
        return memory.lines(torch.cuda.get_device_properties(gpus[0]).total_memory, f"GPU {gpus[0]}")
    return memory.lines(None, "")


def memory_of(recipe: Recipe) -> RecipeMemory | None:
    """Raises DataError where the model's configuration cannot be read."""
    machine, sections = _machine(recipe), recipe.sections
    if recipe.flow == "train-vlm":
        settings = recipe.settings_for(TrainVLMSettings)
        assert isinstance(settings, TrainVLMSettings)
        return language_memory(settings, machine)
    policy, simulator = sections.get("policy"), sections.get("simulator")
    if not isinstance(policy, RobotPolicySettings):
        return None
    from armature.components.planning.robots import robot_memory

    training, evaluation = sections.get("training"), sections.get("evaluation")
    cameras = len(simulator.camera_name_mapping) if isinstance(simulator, SimulatorSettings) else 0
    if recipe.flow == "train-vla-rl":
        rl = recipe.settings_for(TrainVLARLSettings)
        assert isinstance(rl, TrainVLARLSettings)
        return robot_memory(policy, machine, cameras, rl.trainer, rl)
    rows = evaluation.rows_per_pass if isinstance(evaluation, LiberoEvaluationSettings) else 0
    update = training if isinstance(training, VLATrainerSettings) else None
    return robot_memory(policy, machine, cameras or len(policy.image_keys) or 2, update, rows=rows)


def plan_recipe(recipe: Recipe, gpus: Sequence[int], gpu: str, changes: Sequence[str]) -> Iterator[str]:
    """Say how long a step takes on so many GPUs, what each GPU holds, and what most of the step is spent on.

    Args:
        gpus: numbers of GPUs; empty: `SIZES`, for robots `ROBOT_SIZES`.
        changes: `name=value` of assumptions, among them what episodes are like.

    Raises:
        ConfigurationError: a recipe without rollouts, an unknown GPU or assumption, or a model that does not fit.
        DataError: the model's configuration cannot be read.
    """
    values: dict[str, Any] = {}
    for each in changes:
        values |= parse_override(each)
    planners = {"train-vlm": (_plan_language, SIZES), "train-vla-rl": (_plan_robots, ROBOT_SIZES)}
    if recipe.flow not in planners:
        raise ConfigurationError(
            f"{recipe.flow} has no rollouts, which are what is planned",
            code="nothing_to_plan",
            where=recipe.name,
            remedy="give a recipe of train-vlm or train-vla-rl; `armature check` reports the memory of any",
        )
    plan, sizes = planners[recipe.flow]
    sheet = gpu_named(gpu)
    with project(recipe.folder):
        assumed, title, rows = plan(recipe, gpus or sizes, sheet, values)
    yield f"{recipe.name} on {sheet.name}: {title}"
    yield ""
    yield from _table(rows)
    yield ""
    yield f"computed from the sizes of the model, the {sheet.source}, and (change one: --assume NAME=VALUE)"
    for name, value in assumed:
        number = str(value) if isinstance(value, bool) else f"{value:.3g}"
        yield f"  {name:<24} {number:>10}  {type(assumed).model_fields[name].description}"


Plan = tuple[Settings, str, list[list[str]]]  # assumptions, a title, and the table


def _plan_language(recipe: Recipe, gpus: Sequence[int], gpu: Gpu, values: Mapping[str, Any]) -> Plan:
    settings, machine = recipe.settings_for(TrainVLMSettings), _machine(recipe)
    assert isinstance(settings, TrainVLMSettings)
    sizes, assumed = sizes_of(settings), _valid(Assumptions, _episodes(settings) | dict(values))
    plan, rollouts = LanguagePlan(settings, machine, sizes, gpu, assumed), settings.rollouts
    rows = [["GPUs", "servers", "ranks", "server GiB", "rank GiB", *STEP_HEAD]]
    for count in gpus:
        try:
            servers, ranks = plan.best(count)
        except ConfigurationError as error:
            if len(gpus) == 1:
                raise
            rows.append([f"{count:,}", *[""] * (len(rows[0]) - 2), error.what])
            continue
        tensor = f" x {plan.gpus_per_server}" * (plan.gpus_per_server > 1)
        memory = [f"{size / GIB:.0f}" for size in (plan.server_bytes(), plan.rank_bytes(ranks))]
        cells = _step_cells(plan.step(servers, ranks), count, plan.rollouts)
        rows.append([f"{count:,}", f"{servers:,}{tensor}", f"{ranks:,}", *memory, *cells])
    return assumed, _title(sizes.parameters, rollouts), rows


def _plan_robots(recipe: Recipe, gpus: Sequence[int], gpu: Gpu, values: Mapping[str, Any]) -> Plan:
    from armature.components.environments.libero.tasks import suite_tasks
    from armature.components.planning import robots

    settings, policy = recipe.settings_for(TrainVLARLSettings), recipe.sections["policy"]
    assert isinstance(settings, TrainVLARLSettings) and isinstance(policy, RobotPolicySettings)
    assumed, plan = _valid(robots.RobotAssumptions, values), settings.rollouts
    cameras = len(settings.simulator.camera_name_mapping)
    sizes = robots.policy_sizes(robots.read_policy_config(policy), policy, cameras)
    tasks, processes = len(plan.tasks or suite_tasks(plan.suite)), min(_machine(recipe).playing_processes, plan.batch)
    samples = plan.flow_samples if plan.likelihood == "fpo" else 1
    rows = [["GPUs", "rank GiB", *STEP_HEAD]]
    for count in gpus:
        costs = robots.robot_costs(sizes, gpu, assumed, settings, count)
        step = robots.robot_step(costs, assumed, settings, tasks, policy.n_action_steps, processes, count)
        held = sum(robots.policy_trainer_parts(sizes, policy, settings.trainer, count, samples).values())
        cells = _step_cells(step, count, plan.groups_per_step * plan.group_size)
        rows.append([f"{count:,}", f"{held / GIB:.0f}", *cells])
    return assumed, f"{_title(sizes.parameters, plan)}, {plan.batch} simulators in {processes} processes", rows


def _title(parameters: int, plan: RolloutSettings | RobotRolloutSettings) -> str:
    size, ahead = f"{parameters / 1e9:.3g} billion parameters", f"{plan.max_staleness} steps ahead of the training"
    return f"{size}, {plan.groups_per_step} groups of {plan.group_size} in a step, {ahead}"


STEP_HEAD = ("step", "rollouts", "training", "others", "rollouts/s", "GPU s each", "bottleneck")


def _step_cells(step: StepTime, gpus: int, rollouts: int) -> list[str]:
    sides = (sum(side.values()) for side in (step.rollouts, step.training, step.others))
    seconds = [f"{each:,.1f} s" for each in (step.seconds, *sides)]
    name, share = step.bottleneck()
    of_rollouts = [f"{rollouts / step.seconds:,.1f}", f"{gpus * step.seconds / rollouts:,.2f}"]
    return [*seconds, *of_rollouts, f"{name} ({share:.0%} of the step)"]


def _episodes(settings: TrainVLMSettings) -> dict[str, Any]:
    """Return the episodes that the estimate assumes for the recipe."""
    environment, sampling = settings.environment, settings.rollouts.sampling
    kind = ENVIRONMENTS[environment.name]
    most = environment.args.get("max_turns") or getattr(kind, "max_turns", None) or 1
    return {
        "turns": 1.0 if most == 1 else most / 2,
        "dialogue": bool(getattr(kind, "dialogue", True)),
        "prompt_tokens": min(512, max(16, settings.inference.max_model_len - sampling.max_tokens)),
        "completion_tokens": sampling.max_tokens / 2,
    }


def _valid(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """
    Raises:
        ConfigurationError: an unknown assumption, or a value out of bounds.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(
            explain(error, "assume", kind), code=error.errors()[0]["type"], where="--assume"
        ) from error


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with columns aligned to the right, except the last one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, last in rows:
        yield "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)), last]).rstrip()


def _machine(recipe: Recipe) -> Machine:
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    return machine
