"""Which ids a checkpoint knows, compared with the model that transformers makes of it."""

from __future__ import annotations

import pytest

from armature.components.inference.checkpoint import vocabulary
from armature.components.models.load import load_model
from armature.components.models.tiny import make_tiny_checkpoint
from tests.vlm.conftest import model_settings


@pytest.mark.parametrize("family", ["qwen2-vl", "gemma3", "molmo2"])
def test_the_rows_are_those_of_the_model(family, tmp_path):
    folder = make_tiny_checkpoint(family, tmp_path / "model", seed=0)
    settings = model_settings()
    model = load_model(folder, settings)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert vocabulary(folder) == (head.weight.shape[0], embedding.weight.shape[0])
