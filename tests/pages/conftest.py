"""Small rollouts with images, for the pages."""

from __future__ import annotations

import io
import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Trajectory, Turn


class MemoryImages:
    """An image store in memory. `reads` has the key of the image for each read."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.reads: list[str] = []

    def put(self, width: int, height: int, seed: int) -> ImageRef:
        pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return self.keep(out.getvalue(), width, height)

    def keep(self, data: bytes, width: int, height: int) -> ImageRef:
        key = sha256(data).hexdigest()
        self.data[key] = data
        return ImageRef(key, "image/png", width, height)

    def read(self, ref: ImageRef) -> bytes:
        self.reads.append(ref.sha256)
        return self.data[ref.sha256]


@pytest.fixture
def images() -> MemoryImages:
    return MemoryImages()


def make_trajectory(
    name: str,
    refs: tuple[ImageRef, ...] = (),
    *,
    completion: str = "red",
    prompt: str = "What colour?",
    reward: float = 1.0,
    group: str = "g0",
) -> Trajectory:
    """Return a trajectory of one turn. Its token ids are the code points of the completion's characters, so `chr`
    decodes them."""
    content = [*({"type": "image"} for _ in refs), {"type": "text", "text": prompt}]
    turn = Turn(
        index=0,
        prompt_token_ids=np.arange(5, dtype=np.int32),
        completion_token_ids=np.array([ord(c) for c in completion], np.int32),
        completion_logprobs=np.full(len(completion), -0.5, np.float32),
        finish_reason="stop",
        policy_version=3,
        images=refs,
        messages=json.dumps([{"role": "user", "content": content}]),
        completion=completion,
        reward=reward,
        reward_parts={"correct": reward},
        anchor_key=None,
        admissible_key=None,
        action_defect=None,
        generate_seconds=0.5,
        environment_seconds=0.0,
    )
    return Trajectory(name, group, "colors", f"colors/{name}", "train", (turn,), False)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.html"
