"""Tiny checkpoints of every family, and rollouts whose prompt ids come from the family's own processor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from armature.components.contracts.batches import MultimodalBatch, Sample
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import GenerateOutputs, Turn
from armature.components.families.family import FAMILIES
from armature.components.models.adapters import FamilyAdapter, SampleCollator, get_adapter
from armature.components.models.load import load_model
from armature.components.models.settings import ImageAttention
from armature.components.models.tiny import make_tiny_checkpoint
from tests.builders import make_trajectory, make_turn
from tests.vlm.conftest import model_settings

Message = dict[str, Any]


@dataclass
class Tiny:
    """A tiny checkpoint with its model and adapter. It also stores the images of the rollouts that tests make."""

    family: str
    folder: Path
    processor: Any
    model: Any
    adapter: FamilyAdapter
    images: dict[ImageRef, Image.Image] = field(default_factory=dict)

    @property
    def collator(self) -> SampleCollator:
        return self.adapter.collator

    def collate(self, samples: Sequence[Sample]) -> MultimodalBatch:
        return self.collator.collate(samples, self.images.__getitem__)

    def image(self, width: int, height: int, seed: int = 0) -> ImageRef:
        pixels = np.random.default_rng((width, height, seed)).integers(0, 256, (height, width, 3), dtype=np.uint8)
        ref = ImageRef(sha256(pixels.tobytes()).hexdigest(), "image/png", width, height)
        self.images[ref] = Image.fromarray(pixels)
        return ref

    def processed(self, conversations: Sequence[list[Message]], images: Sequence[Sequence[ImageRef]]) -> Any:
        """Return what the family's processor returns for conversations in the chat template, padded on the right."""
        texts = [
            self.processor.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in conversations
        ]
        opened = [[self.images[ref] for ref in row] for row in images]
        return self.processor(
            text=texts, images=opened if any(opened) else None, return_tensors="pt", padding=True, padding_side="right"
        )

    def prompt(self, messages: list[Message], images: Sequence[ImageRef]) -> np.ndarray:
        return self.processed([messages], [images])["input_ids"][0].numpy().astype(np.int32)

    def turn(self, messages: list[Message], images: Sequence[ImageRef], text: str, index: int = 0) -> Turn:
        tokens = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return turn_of(
            self.prompt(messages, images),
            [*tokens, self.processor.tokenizer.eos_token_id],
            images=tuple(images),
            index=index,
            messages=json.dumps(messages),
        )


def turn_of(prompt: Any, completion: Any, logprobs: Any = None, **changes: Any) -> Turn:
    values = -np.arange(1, len(completion) + 1) / 7 if logprobs is None else logprobs
    ids = {"prompt_token_ids": prompt, "completion_token_ids": completion, "completion_logprobs": values}
    return make_turn(**({"reward": 0.5} | ids | changes))


def outputs_of(*trajectories: Sequence[Turn]) -> GenerateOutputs:
    """Return rollouts. Each argument is the list of turns of one trajectory, and two consecutive trajectories form a
    group."""
    return GenerateOutputs(
        [make_trajectory(f"t{number}", f"g{number // 2}", turns) for number, turns in enumerate(trajectories)]
    )


def says(*parts: str | None) -> Message:
    """Return a user message with these parts: texts, and None for an image."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return {"role": "user", "content": content}


def build(family: str, folder: Path, image_attention: ImageAttention | None = None) -> Tiny:
    make_tiny_checkpoint(family, folder, seed=0, image_attention=image_attention)
    processor = AutoProcessor.from_pretrained(folder)
    model = load_model(folder, model_settings())
    images: dict[ImageRef, Image.Image] = {}
    return Tiny(family, folder, processor, model, get_adapter(folder, processor, images.__getitem__), images)


@pytest.fixture(scope="session", params=[*FAMILIES])
def tiny(request, tmp_path_factory) -> Tiny:
    return build(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> Tiny:
    return build("qwen2-vl", tmp_path_factory.mktemp("tiny") / "qwen2-vl")
