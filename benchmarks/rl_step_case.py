"""The task of both sides of the benchmark of whole RL steps: images, a question about each, and a reward.

Knows nothing of this project: TRL's half imports it too.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TEMPERATURE, LEARNING_RATE, MODEL_LENGTH, SERVER_SHARE = 1.0, 1e-6, 2048, 0.3
"""Settings that both sides share. SERVER_SHARE is the fraction of the GPU's memory that the sampler gets."""


def make_image(side: int, number: int) -> Image.Image:
    """Return image number `number`, which is `side` pixels wide and high."""
    coarse = np.random.default_rng([7, number]).integers(0, 255, (side // 14, side // 14, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def reward(answer: str) -> float:
    """Return 0 or 1, which is practically random. The benchmark does not depend on what is learned, but the answers of
    a group must get different rewards."""
    return float(zlib.crc32(answer.encode()) & 1)


def fill_vocabulary(folder: Path, size: int) -> None:
    """Add words to the tokenizer in `folder`, so that every id below `size` has a token.

    The model has `size` outputs. With random weights it samples all of them, and decoding the sampled ids takes time
    that should be measured.

    The model has as many outputs, all of which random weights sample, and to decode them is work.
    """
    file = folder / "tokenizer.json"
    document: dict[str, Any] = json.loads(file.read_text())
    vocabulary = document["model"]["vocab"]
    taken = set(vocabulary.values()) | {token["id"] for token in document["added_tokens"]}
    vocabulary |= {f"word{number}": number for number in range(size) if number not in taken}
    file.write_text(json.dumps(document))
