"""What a trainer needs of memory."""

from __future__ import annotations

from components.rl.check import estimate_memory
from tests.vlm.conftest import Tiny, model_settings, trainer_settings


def test_a_model_that_is_split_takes_its_part_on_each_rank_and_what_is_gathered(tiny: Tiny) -> None:
    model = tiny.model()
    parameters = sum(p.numel() for p in model.parameters())
    block = max(sum(p.numel() for p in layer.parameters()) for layer in model.model.language_model.layers)
    blocks = [*model.model.language_model.layers, *model.model.visual.blocks]
    outside = parameters - sum(p.numel() for layer in blocks for p in layer.parameters())
    settings = trainer_settings(autocast="bf16")
    whole = estimate_memory(tiny.folder, model_settings(dtype="bfloat16"), settings, "bfloat16")
    assert whole.over(1).trainer - whole.activations - whole.logits == parameters * (2 + 4 + 8 + 4)
    split = whole.over(4).trainer - whole.activations - whole.logits
    assert split == parameters * (4 + 4 + 8) // 4 + 2 * (outside + 2 * block)
    compared = estimate_memory(
        tiny.folder, model_settings(), trainer_settings(kl_coefficient=0.1, autocast="bf16"), "bfloat16"
    )
    assert compared.over(4).weights == 2 * parameters
    assert "GiB on each of 4 ranks; 1.00 GiB free on GPU 0" in compared.over(4).lines(2**30, "GPU 0")[1]
