"""examples/grpo.py is the loop of train-vlm: on the same seed it ends with the same weights, evaluated or not."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path

import pytest

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
SHORT = (
    f"trainer.max_steps={STEPS}",
    "rollouts.groups_per_step=4",
    "batches.skip_zero_advantage=false",
    "preflight.groups=1",
    "environment.heldout_tasks=8",
    "model.tiny.format.steps=20",
)


@pytest.mark.slow
def test_grpo_example_ends_with_the_weights_of_the_stage(joined_url: str, tmp_path: Path) -> None:
    overrides = [*SHORT, f'machine.servers.endpoints=["{joined_url}"]', f'machine.store="{tmp_path / "store"}"']
    train = runpy.run_path(str(ROOT / "examples/grpo.py"))["train"]
    accuracy = asyncio.run(train(tmp_path / "example", overrides))
    assert 0 <= accuracy <= 1

    evaluated = ["evaluation.every=2", "evaluation.heldout_tasks=8"]
    recipe = load_recipe("train-vlm/colors", [*overrides, *evaluated])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)

    def made(stage: str, **inputs: Artifact) -> Artifact:
        return run_stage(stage, recipe.settings_for(STAGES[stage].settings), inputs, machine)

    tasks, model = made("tasks"), made("model")
    trained = made("train-vlm", tasks=tasks, model=model)
    ours = tmp_path / f"example/weights/{STEPS:06d}/model.safetensors"
    (theirs,) = tmp_path.glob(f"store/workspaces/train-vlm-*/weights/{STEPS:06d}/model.safetensors")
    assert ours.read_bytes() == theirs.read_bytes()
    assert ours.read_bytes() != (model.path / "model.safetensors").read_bytes()
    accuracies = {
        row["step"]: row.get("heldout/accuracy") for row in json.loads((trained.path / "history.json").read_text())
    }
    assert accuracies[1] is None and None not in {accuracies[step] for step in (0, 2, STEPS)}
