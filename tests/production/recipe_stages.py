"""The stages of a recipe in their order, as its flow runs them, without the platform. Prints the digest of the weights.

`python -m tests.production.recipe_stages RECIPE OVERRIDE...`
"""

from __future__ import annotations

import sys

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.digests import file_digest
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact

WEIGHTS = "the weights have the digest "
SMALL = (
    "rollouts.groups_per_step=4",
    "rollouts.group_size=4",
    "preflight.groups=1",
    "batches.skip_zero_advantage=false",
)
RECIPES = {
    "train-vlm/colors": (
        *SMALL,
        "trainer.max_steps=8",
        "environment.heldout_tasks=16",
        "evaluation.every=0",
        "inference.deterministic=true",
    ),
    "train-vlm/molmo2-tiny": (
        *SMALL,
        "trainer.max_steps=4",
        "trainer.warmup_steps=1",
        "trainer.save_every=4",
        "environment.train_tasks=320",
        "environment.heldout_tasks=8",
        "environment.args.max_turns=8",
        "warm_start.demonstrations=300",
        "warm_start.heldout_demonstrations=4",
        "evaluation.max_tasks=8",
        "inference.deterministic=true",
    ),
    "train-vla/tiny": (
        "demonstrations.episodes_per_task=6",
        "simulator.reach_distance=0.17",
        "training.max_steps=20",
        "training.batch_size=8",
        "training.micro_batch_size=8",
        "training.warmup_steps=0",
        "training.save_every=20",
        "training.heldout.every=20",
        "evaluation.episodes_per_task=2",
        "evaluation.max_steps.libero_spatial=20",
    ),
}
"""Recipes by name, each with overrides that make its steps fewer and smaller."""


def main(name: str, *overrides: str) -> None:
    recipe = load_recipe(name, overrides)
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)

    def run(stage: str, **inputs: Artifact) -> Artifact:
        return run_stage(stage, recipe.settings_for(STAGES[stage].settings), inputs, machine)

    if recipe.flow == "train-vlm":
        tasks, model = run("tasks"), run("model")
        if "warm_start" in recipe.sections:
            model = run("warm-start", tasks=tasks, model=model)
        trained = run("train-vlm", tasks=tasks, model=model)
        assert weights(trained) != weights(model), "it has learned nothing"
    else:
        data = run("demonstrations")
        trained = run("train-vla", policy=run("policy"), dataset=data, statistics=run("quantile-stats", dataset=data))
        run("evaluate-libero", policy=trained)
    print(WEIGHTS + weights(trained), flush=True)


def weights(made: Artifact) -> str:
    (file,) = made.path.rglob("model.safetensors")
    return file_digest(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
