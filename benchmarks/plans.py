"""`python -m benchmarks.plans [RECIPES]` writes docs/planning-recipes.md: what recipes for GPUs would take on many."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from armature.components.configuration import load_recipe, recipe_names
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.planning.geometry import geometry
from armature.components.planning.gpus import GPUS
from armature.components.planning.layout import Planner
from armature.components.planning.robots.geometry import policy_geometry, read_policy_config
from armature.components.rl.settings import TrainVLMSettings
from armature.plan import HEAD, SIZES, described_workload, plan_row
from armature.plan_robots import (
    ROBOT_HEAD,
    ROBOT_SIZES,
    RobotPlanner,
    described_robot_workload,
    robot_row,
    robot_sections,
)
from benchmarks.model_sizes import config_of, policy_config_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning-recipes.md"
GPU = "h100"
SHOWN = ("GPUs", "servers", "ranks", "step", "GPU s each", "servers busy", "trainer busy", "first wall")
TOP = """# Recipes on many GPUs

What the recipes of `train-vlm` and `train-vla-rl` for GPUs would take on H100s, as [`armature plan`](planning.md) says
it without a run to take episodes and costs from: costs are computed, an answer has half of `sampling.max_tokens` in
the mean, an episode half of its turns; weights go to servers by `nccl`. Rollouts per step are those of the recipe,
which was written for few GPUs: where many stand idle, a step needs more groups. "GPU s each" is what a rollout costs,
in seconds of a GPU; "busy" are shares of a step.

With `train-vla-rl` half of the episodes solve their task, in 60 % of `rollouts.max_steps` in the mean. One policy
answers, on the first GPU of the trainer, and the simulators are those of the recipe, however many GPUs there are.

Written by `python -m benchmarks.plans`.
"""


def gpu_recipes() -> list[str]:
    """The recipes of train-vlm and train-vla-rl that train on GPUs."""
    names = [name for name in recipe_names() if name.startswith(("train-vlm/", "train-vla-rl/"))]
    machines = {name: load_recipe(name).sections["machine"] for name in names}
    return [name for name, machine in machines.items() if isinstance(machine, Machine) and machine.trainer_gpus]


def planner(name: str) -> Planner:
    recipe = load_recipe(name, ["machine.weight_transfer=nccl"])
    settings, machine = recipe.settings_for(TrainVLMSettings), recipe.sections["machine"]
    assert isinstance(settings, TrainVLMSettings) and isinstance(machine, Machine)
    config = config_of(settings.model.source)
    sizes = geometry(config, settings.model, settings.trainer, settings.inference.dtype)
    return Planner(settings, machine, sizes, GPUS[GPU], described_workload(settings, {}, None))


def table_row(planned: Planner, gpus: int) -> str:
    try:
        row, _ = plan_row(planned, gpus)
    except ConfigurationError as error:
        return f"| {gpus:,} | " + " | ".join([""] * (len(SHOWN) - 2)) + f" | {error.what} |"
    return "| " + " | ".join(row[HEAD.index(name)].replace("%", " %") for name in SHOWN) + " |"


def robot_planner(name: str) -> RobotPlanner:
    recipe = load_recipe(name)
    settings, _, policy, _ = robot_sections(recipe)
    config = policy_config_of(policy.checkpoint_path) if policy.checkpoint_path else read_policy_config(policy)
    sizes = policy_geometry(config, policy, len(settings.simulator.camera_name_mapping))
    return RobotPlanner(recipe, sizes, GPUS[GPU], described_robot_workload(recipe, {}, None))


def robot_table_row(planned: RobotPlanner, gpus: int) -> str:
    row, _ = robot_row(planned, gpus)
    return "| " + " | ".join(cell.replace("%", " %") for cell in row) + " |"


def robot_section(name: str) -> str:
    planned = robot_planner(name)
    plan = planned.settings.rollouts
    head = [
        f"## {name}",
        "",
        f"{planned.sizes.parameters / 1e9:.3g} billion parameters; a step: {plan.groups_per_step} groups of "
        f"{plan.group_size}.",
        "",
        "| " + " | ".join(ROBOT_HEAD) + " |",
        "|" + "---:|" * (len(ROBOT_HEAD) - 1) + "---|",
    ]
    return "\n".join([*head, *(robot_table_row(planned, gpus) for gpus in ROBOT_SIZES), ""])


def section(name: str) -> str:
    if name.startswith("train-vla-rl/"):
        return robot_section(name)
    planned = planner(name)
    plan = planned.settings.rollouts
    head = [
        f"## {name}",
        "",
        f"{planned.sizes.parameters / 1e9:.2f} billion parameters; a step: {plan.groups_per_step} groups of "
        f"{plan.group_size}.",
        "",
        "| " + " | ".join(SHOWN) + " |",
        "|" + "---:|" * (len(SHOWN) - 1) + "---|",
    ]
    return "\n".join([*head, *(table_row(planned, gpus) for gpus in SIZES), ""])


def written() -> dict[str, str]:
    """The sections of the page, by recipe."""
    parts = PAGE.read_text().split("\n## ")[1:] if PAGE.exists() else []
    return {part.partition("\n")[0]: "## " + part.rstrip("\n") + "\n" for part in parts}


def main(names: Sequence[str]) -> None:
    for name in names or gpu_recipes():
        made = {name: section(name)}
        sections = written() | made
        PAGE.write_text("\n".join([TOP, *(sections[each] for each in gpu_recipes() if each in sections)]))


if __name__ == "__main__":
    main(sys.argv[1:])
