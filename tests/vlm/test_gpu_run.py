"""A short run on GPUs in which weights go from the trainer's GPUs to a vLLM server. Needs CUDA and vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from tests.builders import make_machine

STEPS = 5


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "trainer", "server"),
    [("ipc", (0,), 0), ("nccl", (0, 1), 1), ("ipc", (0, 1), 1)],
    ids=["ipc", "nccl-sharded", "ipc-sharded"],
)
def test_server_samples_from_weights_of_last_step(way, trainer, server, tmp_path):
    """With a learning rate of 1e-3 the log-probs of older weights would not agree with the trainer's."""
    if torch.cuda.device_count() < len(trainer):
        pytest.skip(f"needs {len(trainer)} GPUs")
    recipe = load_recipe("train-vlm/colors", [f"trainer.max_steps={STEPS}", "rollouts.groups_per_step=16"])
    machine = make_machine(
        store=tmp_path / "store",
        weight_transfer=way,
        servers__python=Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python")),
        servers__gpus=((server,),),
        servers__arguments={"gpu_memory_utilization": 0.2, "enforce_eager": True},
        trainer__processes=len(trainer),
        trainer__gpus=trainer,
        ready_timeout=300,
        sync_timeout=60,
        train_timeout=60,
    )

    def make(stage: str, **inputs: object) -> Path:
        return run_stage(stage, recipe.settings_for(STAGES[stage].settings), inputs, machine)  # type: ignore[arg-type]

    run = make("train-vlm", tasks=make("tasks"), model=make("model"))
    history = json.loads((run.path / "history.json").read_text())
    print([(step["mismatch_kl"], step["timing/sync"]) for step in history])
    assert len(history) == STEPS
    assert all(step["grad_norm"] > 0 for step in history)
    assert max(step["mismatch_kl"] for step in history) < 1e-4
