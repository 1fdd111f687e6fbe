"""The work of both sides of the GPU benchmark of SmolVLA: the released sizes, and examples.

Knows nothing of this project: LeRobot's half imports it too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

CHUNK, WIDTH, STATES, ACTIONS = 50, 32, 8, 7
CAMERAS = ("observation.images.image", "observation.images.wrist_image")
CASES = (
    *(f"{mode} {count} bfloat16" for mode in ("expert", "full") for count in (8, 32, 64)),
    *(f"{mode} {count} float32" for mode in ("expert", "full") for count in (8, 32)),
    *(f"answer {count} bfloat16" for count in (1, 8, 32)),
)
"""Names of the cases: as in `policy_case`, with the dtype of the VLM. bfloat16 is with autocast, float32 with TF32."""
WORDS = ("<pad>", "<eos>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>")


def policy_fields(small: bool) -> dict[str, Any]:
    """Return the fields of a policy's config.json that are not LeRobot's defaults."""
    return {"num_vlm_layers": 2, "resize_imgs_with_padding": (64, 64)} if small else {}


def vlm_config(small: bool) -> dict[str, Any]:
    """Return the configuration of SmolVLM2-500M-Video-Instruct. With `small`, of a small one, for a trial on a CPU."""
    text, vision = (960, 2560, 32, 15, 5), (768, 3072, 12, 12)
    if small:
        text, vision = (64, 96, 2, 4, 2), (24, 32, 1, 2)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    side = {"image_size": 64 if small else 512, "patch_size": 16}
    heads = {"head_dim": 16 if small else 64, "vocab_size": 49_280, "pad_token_id": 0, "tie_word_embeddings": False}
    return {
        "model_type": "smolvlm",
        "text_config": {"model_type": "llama", **dict(zip(sizes, text, strict=True)), **heads},
        "vision_config": {**dict(zip(sizes, vision, strict=False)), **side},
        "scale_factor": 2 if small else 4,
        "image_token_id": 3,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def make_tokenizer() -> Any:
    """Return a tokenizer that has only special tokens: examples are token ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    names = dict(zip(("image_token", "fake_image_token", "global_image_token"), WORDS[3:], strict=True))
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, extra_special_tokens=names, **special)


def arrays(small: bool, count: int) -> dict[str, np.ndarray]:
    """Return examples with two images at the model's resolution, and with texts whose lengths differ as in LIBERO.

    ids, seen: (count, L), padded on the right. images: (count, cameras, 3, side, side) in [0, 1].
    state: (count, STATES). actions: (count, CHUNK, ACTIONS).
    """
    random = np.random.default_rng(0)
    lengths = random.integers(12, 30, count)
    side = 64 if small else 512
    return {
        "ids": random.integers(len(WORDS), 49_000, (count, 32)),
        "seen": np.arange(32) < lengths[:, None],
        "images": random.random((count, len(CAMERAS), 3, side, side), dtype=np.float32),
        "state": random.uniform(-1, 1, (count, STATES)).astype(np.float32),
        "actions": random.uniform(-1, 1, (count, CHUNK, ACTIONS)).astype(np.float32),
    }


def flow_samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return LeRobot's times (count,), from actions (0) to noise (1), and noise (count, CHUNK, WIDTH)."""
    random = np.random.default_rng(1)
    times = torch.from_numpy(random.integers(1, 16, count).astype(np.float32) / 16)  # so 1 - time is exact
    return times, torch.from_numpy(random.standard_normal((count, CHUNK, WIDTH)).astype(np.float32))


def answer_noise(count: int) -> torch.Tensor:
    """Return the noise (count, CHUNK, WIDTH) that our sampler draws for the seeds 0, 1, ..."""
    seeds = [torch.Generator().manual_seed(seed) for seed in range(count)]
    return torch.stack([torch.randn(CHUNK, WIDTH, generator=generator) for generator in seeds])
