"""A very small model, and examples with random tokens, images and actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.batch import Example, PolicyBatch

EOS, ACTION_START, ACTION_END, FIRST_ACTION = 5, 20, 21, 22
VOCABULARY, PATCH, IMAGE_START, IMAGE_END = 60, 62, 60, 61
HORIZON, DIMENSIONS, USED = 5, 8, 3
SIDE_PATCHES = 3  # of an image; pooled 2 by 2 with padding: 4 image tokens
PIXELS = 14 * 14 * 3

HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, **HEADS, "float32_attention": True}
ADAPTER = {"hidden_size": 16, "intermediate_size": 20, "text_hidden_size": 32, **HEADS}
TEXT = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, **HEADS, "num_attention_heads": 4}
EXPERT = {"hidden_size": 24, "num_layers": 3, "num_heads": 3, "mlp_ratio": 1.5, "ffn_multiple_of": 8}
RAW: dict[str, Any] = {
    "model_type": "molmoact2",
    "vit_config": VISION | {"image_default_input_size": [42, 42], "image_num_pos": 9},
    "adapter_config": ADAPTER | {"vit_layers": [-2, -4], "pooling_attention_mask": True},
    "text_config": TEXT
    | {"vocab_size": VOCABULARY, "additional_vocab_size": 8, "max_position_embeddings": 256, "rope_theta": 5e6}
    | {"qkv_bias": False, "use_qk_norm": True, "qk_norm_type": "qwen3"},
    "action_expert_config": EXPERT | {"timestep_embed_dim": 12, "a_field_of_tomorrow": [1, 2]},
    "image_patch_id": PATCH,
    "image_start_token_id": IMAGE_START,
    "image_end_token_id": IMAGE_END,
    "action_start_token_id": ACTION_START,
    "action_end_token_id": ACTION_END,
    "action_token_start_id": FIRST_ACTION,
    "num_action_tokens": 16,
}
RAW |= {"eos_token_id": EOS, "bos_token_id": EOS, "pad_token_id": 0}
RAW |= {"max_action_dim": DIMENSIONS, "max_action_horizon": HORIZON, "transformers_version": "4.57.1"}
CONFIG = MolmoAct2Config.from_dict(RAW)


def make_model(seed: int = 0, residual_dropout: float = 0.0) -> MolmoAct2:
    """Make a model whose random weights are large enough for every part to matter, also those initialized as zero."""
    model = MolmoAct2(CONFIG, residual_dropout=residual_dropout)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = 0.3 if parameter.ndim > 1 else 0.1
            parameter.normal_(0.0, scale, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model


def make_example(
    rng: np.random.Generator, words: int = 6, images: int = 1, answer: int = 0, valid_steps: int = HORIZON
) -> Example:
    """Return an example that consists of BOS, `images` images, words with an EOS among them, and `answer` action
    tokens."""
    image = [IMAGE_START, *[PATCH] * 4, IMAGE_END]
    text = rng.integers(30, VOCABULARY, words).tolist()
    ids = [EOS, *image * images, *text[: words // 2], EOS, *text[words // 2 :]]
    prompt = len(ids)
    if answer:
        bins = (FIRST_ACTION + rng.integers(0, 8, answer)).tolist()
        ids += [ACTION_START, *bins, ACTION_END, EOS]
    labels = np.full(len(ids), -100)
    labels[prompt:] = ids[prompt:]
    grid = np.full((4, 4), -1)
    grid[:SIDE_PATCHES, :SIDE_PATCHES] = np.arange(SIDE_PATCHES**2).reshape(SIDE_PATCHES, SIDE_PATCHES)
    pooling = grid.reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
    offsets = np.arange(images)[:, None, None] * SIDE_PATCHES**2
    actions = np.zeros((HORIZON, DIMENSIONS), np.float32)
    actions[:valid_steps, :USED] = rng.uniform(-1, 1, (valid_steps, USED))
    return Example(
        input_ids=np.array(ids),
        image_tokens=np.isin(ids, [IMAGE_START, PATCH, IMAGE_END]),
        pixel_values=rng.integers(0, 256, (images, SIDE_PATCHES**2, PIXELS), dtype=np.uint8),
        pooling=np.where(pooling >= 0, pooling + offsets, -1).reshape(-1, 4),
        labels=labels if answer else None,
        actions=actions,
        horizon_padding=np.arange(HORIZON) >= valid_steps,
        dimension_padding=np.arange(DIMENSIONS) >= USED,
    )


def make_examples(count: int, seed: int = 0, answer: bool = False, **facts: Any) -> list[Example]:
    """Return examples that differ in length and in the number of images."""
    rng = np.random.default_rng(seed)
    return [
        make_example(rng, words=4 + 3 * index, images=1 + index % 2, answer=(3 + index) * answer, **facts)
        for index in range(count)
    ]


def as_batch(
    examples: Sequence[Example], rows: Sequence[Sequence[int]] | None = None, side: str = "left", extra: int = 0
) -> PolicyBatch:
    """Make a batch of rows of examples, by default one per row, padded to the longest row plus `extra` tokens."""
    rows = [[index] for index in range(len(examples))] if rows is None else rows
    order = [index for row in rows for index in row]
    width = max(sum(examples[index].length for index in row) for row in rows) + extra

    def padded(row: Sequence[int], of: Any, fill: int) -> list[int]:
        flat = [int(value) for index in row for value in of(index)]
        gap = [fill] * (width - len(flat))
        return gap + flat if side == "left" else flat + gap

    def table(of: Any, fill: int) -> torch.Tensor:
        return torch.tensor([padded(row, of, fill) for row in rows])

    chosen = [examples[index] for index in order]
    crops = np.cumsum([0, *[len(one.pixel_values) for one in chosen]])
    pooling = [
        np.where(one.pooling >= 0, one.pooling + first * SIDE_PATCHES**2, -1)
        for one, first in zip(chosen, crops, strict=False)
    ]
    has_labels = all(one.labels is not None for one in chosen)
    stack = lambda name: torch.from_numpy(np.stack([getattr(one, name) for one in chosen]))  # noqa: E731
    return PolicyBatch(
        input_ids=table(lambda index: examples[index].input_ids, 0),
        position_ids=table(lambda index: range(examples[index].length), 0),
        example_ids=table(lambda index: [order.index(index)] * examples[index].length, -1),
        image_tokens=table(lambda index: examples[index].image_tokens, 0).bool(),
        pixel_values=torch.from_numpy(np.concatenate([one.pixel_values for one in chosen])),
        pooling=torch.from_numpy(np.concatenate(pooling)),
        rows=torch.tensor([row for row, indices in enumerate(rows) for _ in indices]),
        labels=table(lambda index: examples[index].labels, -100) if has_labels else None,
        actions=stack("actions"),
        horizon_padding=stack("horizon_padding"),
        dimension_padding=stack("dimension_padding"),
    )


def make_draws(examples: int, draws: int = 4, seed: int = 3) -> FlowSamples:
    return FlowSamples.per_example(range(seed, seed + examples), draws, HORIZON, CONFIG)


def make_plan(**changes: Any) -> LossPlan:
    values: dict[str, Any] = {
        "action_mode": "continuous",
        "bidirectional_images": False,
        "hides_answers": False,
        "knowledge_insulation": False,
        "mask_dimensions": True,
        "z_scale": 1e-4,
        "token_weighting": "root_subsegments_root_tokens",
    }
    return LossPlan(**(values | changes))
