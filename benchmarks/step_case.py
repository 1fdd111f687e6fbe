"""What both sides of the GPU benchmark train: a model of Qwen2.5-VL-3B's sizes, prompts with images, answers, rewards.

Knows nothing of this project: TRL's half imports it too.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2_5_VLConfig

GROUPS, GROUP_SIZE, PROMPT_TOKENS = 8, 8, 330
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 SXM, by their data sheets."""
TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6,
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}
SMALL_TEXT = TEXT | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
}
SMALL_VISION = VISION | {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 84,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
SMALL_ROPE = ROPE | {"mrope_section": [4, 6, 6]}
TEXT_7B = TEXT | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}
VISION_7B = VISION | {"out_hidden_size": 3584}
LENGTHS = {"A": (256, 256), "B": (1024, 1024), "C": (32, 1024)}
"""Least and most sampled tokens of an answer."""


@dataclass(frozen=True)
class Case:
    """Answers to `GROUPS` prompts with one image each, `GROUP_SIZE` to a prompt, in order.

    Args:
        folder: where the processor is.
        name: of `LENGTHS`.
        small: few tokens, to see on a CPU that it runs.
    """

    folder: Path
    name: str
    small: bool = False

    @property
    def side(self) -> int:
        """Pixels of an image."""
        return 112 if self.small else 448

    @cached_property
    def lengths(self) -> np.ndarray[Any, Any]:
        least, most = (n // 16 for n in LENGTHS[self.name]) if self.small else LENGTHS[self.name]
        return self._random(1).integers(least, most + 1, GROUPS * GROUP_SIZE)

    @cached_property
    def answers(self) -> list[np.ndarray[Any, Any]]:
        low, high = (500, 2000) if self.small else (1000, 151_000)
        return [self._random(2 + row).integers(low, high, n).astype(np.int32) for row, n in enumerate(self.lengths)]

    @cached_property
    def images(self) -> list[Image.Image]:
        found = []
        for group in range(GROUPS):
            coarse = self._random(1000 + group).integers(0, 255, (self.side // 14, self.side // 14, 3), dtype=np.uint8)
            found.append(Image.fromarray(coarse).resize((self.side, self.side), Image.Resampling.BICUBIC))
        return found

    @property
    def rewards(self) -> list[float]:
        return [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0] * GROUPS

    def question(self, processor: Any) -> str:
        """A text that makes the prompt `PROMPT_TOKENS` long, or 44."""
        wanted, words = 44 if self.small else PROMPT_TOKENS, "What is this thing in the image and why do you think so"
        text = "What"
        while (n := len(self.prompt(processor, text))) < wanted:
            text += " " + words.split()[len(text.split()) % 13] if n < wanted - 8 else "?"
        return text

    def prompt(self, processor: Any, text: str) -> np.ndarray[Any, Any]:
        """Its token ids, those of the image included."""
        content = [{"type": "image", "image": self.images[0]}, {"type": "text", "text": text}]
        chat = [[{"role": "user", "content": content}]]
        ids = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        return np.asarray(ids["input_ids"][0])

    def _random(self, seed: int) -> np.random.Generator:
        return np.random.default_rng([seed, ord(self.name)])


def model_config(folder: Path, small: bool, seven: bool = False) -> Qwen2_5_VLConfig:
    """Of the 3B's sizes; `seven`: of the 7B's, whose head is not tied."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": not seven,
    }
    text, vision, rope = (SMALL_TEXT, SMALL_VISION, SMALL_ROPE) if small else (TEXT, VISION, ROPE)
    if seven:
        text, vision = TEXT_7B, VISION_7B
    return Qwen2_5_VLConfig(
        text_config=text | special | {"rope_parameters": rope},
        vision_config=dict(vision),
        tie_word_embeddings=not seven,
        **ids,
    )


def make_model(folder: Path, attention: str, device: str, small: bool, seven: bool = False) -> Any:
    """Random weights in bf16, the same on both sides; see `model_config`."""
    config = model_config(folder, small, seven)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name or "ln_q" in name else 0.0)
    return model


def needed_flops(lengths: np.ndarray[Any, Any], shared: bool) -> float:
    """Operations of one update of the 3B model, forward and backward, nothing twice: 6 per weight and token, and
    attention. `shared`: a group's image and prompt count once.
    """
    d, layers, n = TEXT["hidden_size"], TEXT["num_hidden_layers"], PROMPT_TOKENS
    v, m, patches, window = VISION["hidden_size"], VISION["intermediate_size"], 1024, 64
    weights = layers * (2 * d * d + 2 * d * 256 + 3 * d * TEXT["intermediate_size"])
    prompts = GROUPS if shared else len(lengths)
    tokens = lengths.sum() + prompts * n
    attention = sum(6 * layers * d * (length + n) ** 2 for length in lengths)
    blocks, merger = VISION["depth"] * (4 * v * v + 3 * v * m) + 1176 * v, (4 * v) * (4 * v) + 4 * v * d
    image = 6 * blocks * patches + 6 * merger * patches / 4 + 12 * patches * v * (4 * patches + 28 * window)
    return float(6 * weights * tokens + attention + 6 * TEXT["vocab_size"] * d * lengths.sum() + image * prompts)


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def say(file: Path, result: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)
