"""A model learns which way a square moves: servers that a training starts accept the videos of its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from armature import MultimodalGRPOTrainer, MultimodalRLConfig, load_recipe
from armature.components.models.tiny import make_tiny_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_direction_is_learned_from_videos(tmp_path: Path) -> None:
    if not (Path(__file__).parents[2] / ".venv-vllm/bin/python").exists():
        pytest.skip("needs .venv-vllm: make environments")
    tiny = load_recipe("train-vlm/motion-tiny").sections["model"].tiny
    model = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", tiny.seed, tiny)
    config = MultimodalRLConfig(
        output_dir=tmp_path / "run",
        env_id="motion",
        max_steps=20,
        learning_rate=3e-4,
        max_tokens=4,
        rollouts_per_step=256,
        micro_batch_size=256,
        eval_steps=20,
    )
    result = MultimodalGRPOTrainer(model, config=config, server="auto").train()
    before, after = (row["heldout/accuracy"] for row in result.history if "heldout/accuracy" in row)
    assert before < 0.65 and after >= 0.85
