"""The work of both sides of the GPU benchmark: models of Qwen-VL's sizes, prompts with images, answers, rewards.

Knows nothing of this project: TRL's half imports it too.
"""

from __future__ import annotations

import gc
import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, PretrainedConfig, Qwen2_5_VLConfig, Qwen3VLConfig

GROUPS, GROUP_SIZE = 8, 8
PEAK_FLOPS = 989e12
"""Peak bf16 operations per second of an H100 or H200 SXM without sparsity, from their data sheets."""
LIMIT = "STEP_LIMIT_GIB"
"""Environment variable with the GiB of GPU memory that PyTorch may allocate, as on a smaller GPU."""
NO_MEMORY = "out of memory"
"""Result of a way that needs more memory than there is."""
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
TEXT_4B = TEXT | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
VISION_4B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2560,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
ROPE_4B = ROPE | {"rope_theta": 5_000_000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
SMALL_VISION_4B = VISION_4B | {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
SMALL_ROPE_4B = ROPE_4B | {"mrope_section": [6, 5, 5]}


@dataclass(frozen=True)
class Work:
    """Prompts and answers of a case.

    Args:
        lengths: least and most sampled tokens of an answer.
        seed: of what is random.
        family: of the model, by which `processors` has its processor.
        rows: answers.
        images: of a prompt.
        pixels: of an image, its width and height.
        shared: `GROUP_SIZE` answers have one prompt; otherwise each has its own.
    """

    lengths: tuple[int, int]
    seed: int
    family: str = "qwen2.5-vl"
    rows: int = GROUPS * GROUP_SIZE
    prompt_tokens: int = 330
    images: int = 1
    pixels: tuple[int, int] = (448, 448)
    shared: bool = True

    @property
    def prompts(self) -> int:
        return self.rows // GROUP_SIZE if self.shared else self.rows


QWEN3 = Work((100, 700), 777, "qwen3-vl", rows=48, prompt_tokens=500, images=2, pixels=(308, 420))
WORK = {
    "A": Work((256, 256), ord("A")),
    "B": Work((1024, 1024), ord("B")),
    "C": Work((32, 1024), ord("C")),
    "Q": QWEN3,
    "U": replace(QWEN3, shared=False),
}
"""Cases by name. Q and U have the sizes of Qwen3-VL-4B and differ in one thing only: in U no two answers share a
prompt."""


@dataclass(frozen=True)
class Case:
    """Answers to prompts with images. Each `GROUP_SIZE` consecutive answers are a group for the advantages.

    Args:
        folder: where the processor of `work.family` is.
        name: of `WORK`.
        small: few tokens, to see on a CPU that it runs.
    """

    folder: Path
    name: str
    small: bool = False

    @property
    def work(self) -> Work:
        return WORK[self.name]

    @cached_property
    def lengths(self) -> np.ndarray[Any, Any]:
        least, most = (n // 16 for n in self.work.lengths) if self.small else self.work.lengths
        return self._random(1).integers(least, most + 1, self.work.rows)

    @cached_property
    def answers(self) -> list[np.ndarray[Any, Any]]:
        low, high = (500, 2000) if self.small else (1000, 151_000)
        return [self._random(2 + row).integers(low, high, n).astype(np.int32) for row, n in enumerate(self.lengths)]

    @cached_property
    def images(self) -> list[list[Image.Image]]:
        """Return the list of images of each prompt."""
        width, height = (side // 4 for side in self.work.pixels) if self.small else self.work.pixels
        numbers = np.arange(self.work.prompts * self.work.images).reshape(self.work.prompts, -1)
        return [[self._image(int(number), width, height) for number in prompt] for prompt in numbers]

    def _image(self, number: int, width: int, height: int) -> Image.Image:
        coarse = self._random(1000 + number).integers(0, 255, (height // 14, width // 14, 3), dtype=np.uint8)
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)

    @property
    def rewards(self) -> list[float]:
        return [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0] * (self.work.rows // GROUP_SIZE)

    def prompt_of(self, row: int) -> int:
        """Return the index of the prompt that answer `row` belongs to."""
        return row * self.work.prompts // self.work.rows

    def question(self, processor: Any) -> str:
        """Return a text with which the prompt has `work.prompt_tokens` tokens, or 44 tokens if the case is small."""
        wanted = 44 if self.small else self.work.prompt_tokens
        text, words = "What", "What is this thing in the image and why do you think so"
        while (n := len(self.prompt(processor, text))) < wanted:
            text += " " + words.split()[len(text.split()) % 13] if n < wanted - 8 else "?"
        return text

    def prompt(self, processor: Any, text: str) -> np.ndarray[Any, Any]:
        """Return the token ids of the prompt with this text, including all tokens of its images."""
        content = [{"type": "image", "image": image} for image in self.images[0]] + [{"type": "text", "text": text}]
        chat = [[{"role": "user", "content": content}]]
        ids = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        return np.asarray(ids["input_ids"][0])

    def _random(self, seed: int) -> np.random.Generator:
        return np.random.default_rng([seed, self.work.seed])


def model_config(folder: Path, small: bool, size: str = "3b") -> PretrainedConfig:
    """Return a configuration with the sizes of Qwen2.5-VL-3B (`3b`), of Qwen2.5-VL-7B (`7b`, whose output head is not
    tied) or of Qwen3-VL-4B (`4b`).

    `small`: a tiny model of the same family.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    tied = size != "7b"
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": tied,
    }
    if size == "4b":
        config, text, vision, rope = Qwen3VLConfig, TEXT_4B, VISION_4B, ROPE_4B
        small_text, small_vision, small_rope = SMALL_TEXT | {"head_dim": 32}, SMALL_VISION_4B, SMALL_ROPE_4B
    else:
        config, rope = Qwen2_5_VLConfig, ROPE
        text, vision = (TEXT_7B, VISION_7B) if size == "7b" else (TEXT, VISION)
        small_text, small_vision, small_rope = SMALL_TEXT, SMALL_VISION, SMALL_ROPE
    if small:
        text, vision, rope = small_text, small_vision, small_rope
    return config(
        text_config=text | special | {"rope_parameters": rope},
        vision_config=dict(vision),
        tie_word_embeddings=tied,
        **ids,
    )


def make_model(folder: Path, attention: str, device: str, small: bool, size: str = "3b") -> Any:
    """Return a model with random bf16 weights, which are the same on both sides. See `model_config` for its sizes."""
    config = model_config(folder, small, size)
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


def needed_flops(case: Case, shared: bool = True) -> float:
    """Return the number of operations that one update needs, forward and backward, without recomputation.

    These are 6 operations for each weight and token, and the operations of attention.

    `shared`: a prompt and its images count once, as often as there are different ones.
    """
    work, qwen3 = case.work, case.work.family == "qwen3-vl"
    text, vision = (TEXT_4B, VISION_4B) if qwen3 else (TEXT, VISION)
    d, layers, n = text["hidden_size"], text["num_hidden_layers"], work.prompt_tokens
    heads, keys = 128 * text["num_attention_heads"], 128 * text["num_key_value_heads"]
    weights = layers * (2 * d * heads + 2 * d * keys + 3 * d * text["intermediate_size"])
    prompts = work.prompts if shared else work.rows
    tokens = case.lengths.sum() + prompts * n
    attention = sum(6 * layers * heads * (length + n) ** 2 for length in case.lengths)
    image = _image_flops(vision, d, 520, qwen3=True) if qwen3 else _image_flops(vision, d, 1024, qwen3=False)
    head = 6 * text["vocab_size"] * d * case.lengths.sum()
    return float(6 * weights * tokens + attention + head + image * work.images * prompts)


def _image_flops(vision: dict[str, Any], d: int, patches: int, *, qwen3: bool) -> float:
    """Return the number of operations for one image in the vision tower. In Qwen3-VL every layer attends to all
    patches, and three layers have a merger of their own. In Qwen2.5-VL four layers attend to all patches, and the
    others attend to windows of 64 patches."""
    v, m, depth = vision["hidden_size"], vision["intermediate_size"], vision["depth"]
    layer, attended = 4 * v * v + (2 if qwen3 else 3) * v * m, depth * patches if qwen3 else 4 * patches + 28 * 64
    mergers = (4 if qwen3 else 1) * ((4 * v) * (4 * v) + 4 * v * d)
    blocks = depth * layer + 2 * 3 * vision["patch_size"] ** 2 * v
    return float(6 * blocks * patches + 6 * mergers * patches / 4 + 12 * patches * v * attended)


def limit_memory() -> None:
    """Let PyTorch allocate only as much GPU memory as the environment variable `LIMIT` says, if it is set."""
    if (gib := os.environ.get(LIMIT)) and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(float(gib) * 2**30 / torch.cuda.mem_get_info()[1])


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def need_gpu(otherwise: str) -> None:
    """Exit if there is no GPU. `otherwise` is the part of the message which says what can be run without a GPU.

    Raises:
        SystemExit: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise SystemExit(f"this measurement needs a GPU, and torch sees none; without one: {otherwise}")


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def say(file: Path, result: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)
