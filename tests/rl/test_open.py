"""The adapters that a run's servers hold beside its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from armature.components.configuration import load_recipe
from armature.components.contracts.errors import TrainerError
from armature.components.inference.command import ServedAdapters
from armature.components.models.settings import LoraSettings, ModelSettings
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.rl.open import served_adapters
from tests.end_to_end.conftest import make
from tests.refusals import refused


@pytest.mark.parametrize(
    ("family", "lora", "freeze", "expected"),
    [
        ("qwen2-vl", None, (), None),
        ("qwen2-vl", {}, (), None),
        ("qwen2-vl", {"served_as": "adapter", "rank": 8}, (), ServedAdapters(8)),
        ("qwen2-vl", {"served_as": "adapter", "scope": "all"}, (), ServedAdapters(16, vision=True)),
        ("llava", {"served_as": "adapter"}, (), ServedAdapters(16)),
        ("llava", {"served_as": "adapter", "scope": "all"}, ("vision", "projector"), ServedAdapters(16)),
        ("llava", {"served_as": "adapter", "scope": "all"}, ("vision",), 'scope = "language"'),
        ("molmo2", {"served_as": "adapter"}, (), 'served_as = "merged"'),
        ("qwen3-vl-moe", {"served_as": "adapter"}, (), 'served_as = "merged"'),
        ("molmo2", {}, (), None),
    ],
)
def test_family_decides_which_adapter_scopes_are_served(
    family: str,
    lora: dict[str, object] | None,
    freeze: tuple[str, ...],
    expected: ServedAdapters | str | None,
    tmp_path: Path,
) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / "model", seed=0)
    adapters = LoraSettings.model_validate(lora) if lora is not None else None
    settings = ModelSettings(source=str(folder), lora=adapters, freeze=freeze)
    if not isinstance(expected, str):
        assert served_adapters(settings, folder) == expected
        return
    with refused("adapters_not_served", family, expected):
        served_adapters(settings, folder)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer must fail to start")
def test_server_on_the_trainer_s_gpu_starts_after_the_trainer(tmp_path: Path) -> None:
    """vLLM measures the free memory of its GPU at the start. Here the trainer fails, so no server may start."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    python.chmod(0o755)
    servers = f'{{gpus = [[0]], weight_transfer = "ipc", python = "{python}"}}'
    machine = [f'machine.store="{tmp_path / "store"}"', f"machine.servers={servers}", "machine.trainer.gpus=[0]"]
    recipe = load_recipe("train-vlm/colors", ["model.tiny.format.steps=1", *machine])
    tasks, model = make(recipe, "tasks"), make(recipe, "model")
    with pytest.raises(TrainerError):
        make(recipe, "train-vlm", tasks=tasks, model=model)
    assert not (tmp_path / "started").exists()
