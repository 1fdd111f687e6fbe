"""The stages of a recipe in their order, as its flow runs them, without the platform. Prints the digest of the weights.

`python -m tests.production.recipe_stages RECIPE OVERRIDE...`
"""

from __future__ import annotations

import sys

from components.artifacts.digests import file_digest
from components.configuration import load_recipe
from components.contracts.machine import Machine
from components.contracts.stages import Artifact
from components.stages import STAGES, run_stage

WEIGHTS = "the weights have the digest "


def main(name: str, *overrides: str) -> None:
    recipe = load_recipe(name, overrides)
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)

    def run(stage: str, **inputs: Artifact) -> Artifact:
        return run_stage(stage, recipe.settings_for(STAGES[stage].settings), inputs, machine)

    if recipe.flow == "train-vlm":
        tasks, model = run("tasks"), run("model")
        if "warm_start" in recipe.sections:
            model = run("sft", tasks=tasks, model=model)
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
