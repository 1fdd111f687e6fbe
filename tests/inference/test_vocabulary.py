"""Which ids a checkpoint knows, compared with the model that transformers makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from armature.components.inference.checkpoint import vocabulary
from armature.components.models.load import load_model
from armature.components.models.settings import ModelSettings
from armature.components.models.tiny import make_tiny_checkpoint


@pytest.mark.parametrize("family", ["qwen2-vl", "gemma3", "molmo2"])
def test_the_rows_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / "model", seed=0)
    settings = ModelSettings(
        source=str(folder),
        dtype="float32",
        attn_implementation="sdpa",
        trust_remote_code=False,
        freeze=(),
        gradient_checkpointing=False,
    )
    model = load_model(folder, settings)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert vocabulary(folder) == (head.weight.shape[0], embedding.weight.shape[0])
