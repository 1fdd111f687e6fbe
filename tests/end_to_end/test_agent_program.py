"""The agent of examples/agent.py is trained on a real server: its tokens are recorded and trained on as sampled."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest

from armature import MultimodalGRPOTrainer, MultimodalRLConfig, load_recipe
from armature.components.contracts.images import EncodedImage
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.models.tiny import make_tiny_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"


def write_table(folder: Path) -> Path:
    """Write images with a dot, whose color is the answer, and return the file of their rows."""
    rows = []
    dot = EnvironmentSettings(name="dot", args={}, train_tasks=24, heldout_tasks=8)
    with closing(make_environment(dot)) as environment:
        for number, task in enumerate([*environment.tasks("train"), *environment.tasks("heldout")]):
            content = asyncio.run(environment.episode(task).reset()).content
            (image,) = (part for part in content if isinstance(part, EncodedImage))
            (folder / f"{number}.png").write_bytes(image.data)
            rows.append({"image": f"{number}.png", "color": task.payload["color"], "split": task.split})
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_agent_on_the_openai_package_is_trained(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("needs .venv-vllm: make environments")
    tiny = load_recipe("train-vlm/zoom-tiny").sections["model"].tiny
    model = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", tiny.seed, tiny)
    config = MultimodalRLConfig(
        output_dir=tmp_path / "run",
        env_id="program",
        env_args={
            "command": [str(PYTHON), str(ROOT / "examples/agent.py")],
            "source": str(write_table(tmp_path)),
            "prompt": "{image}What color is the dot?",
            "images": ["image"],
            "answer": "color",
            "split": {"by": "column", "train": ["train"], "heldout": ["heldout"]},
            "rewards": [{"name": "exact_match"}],
            "max_turns": 3,
        },
        max_steps=2,
        learning_rate=1e-4,
        max_tokens=48,
        rollouts_per_step=8,
        rollouts_per_example=8,
        micro_batch_size=16,
        max_concurrent=8,
    )
    result = MultimodalGRPOTrainer(model, config=config, server="auto").train()
    assert len(result.history) == 2
    for row in result.history:
        assert row["rollouts/failed"] == 0.0 and row["mismatch_kl"] < 1e-6
    called = [row for row in result.history if row.get("tools/used", 0.0)]
    assert called and all(row["turns"] > 1.0 for row in called)
    assert any(row["samples"] < row["turns"] for row in called)  # later turns continue the recorded tokens
