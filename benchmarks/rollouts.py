"""Rollouts as a server would have returned them, without a server: exact placeholders, random completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory, Turn
from armature.components.models.adapters import get_adapter
from armature.components.models.adapters.family import FamilyAdapter
from armature.components.models.load import load_processor
from armature.components.models.settings import ModelSettings

Ids = npt.NDArray[Any]
FAMILY = "qwen2-vl"
SETTINGS = {
    "dtype": "float32",
    "attn_implementation": "sdpa",
    "trust_remote_code": False,
    "freeze": [],
    "gradient_checkpointing": False,
}


def model_settings(checkpoint: Path) -> ModelSettings:
    return ModelSettings.model_validate({"source": str(checkpoint), **SETTINGS})


def adapter_of(checkpoint: Path, images: ImageStore) -> FamilyAdapter:
    return get_adapter(checkpoint, load_processor(checkpoint, model_settings(checkpoint)), images.open, None)


def one_turn(
    group: int, member: int, prompt: Ids, answer: Ids, images: tuple[ImageRef, ...], reward: float
) -> Trajectory:
    """Return an episode that has one prompt with images and one answer."""
    turn = Turn(
        index=0,
        prompt_token_ids=prompt.astype(np.int32),
        completion_token_ids=answer.astype(np.int32),
        completion_logprobs=np.full(len(answer), -2.0, np.float32),
        finish_reason="length",
        policy_version=0,
        images=images,
        messages="[]",
        completion="",
        reward=reward,
        reward_parts={"correct": 0.0},
        anchor_key=None,
        admissible_key=None,
        action_defect=None,
        generate_seconds=0.0,
        environment_seconds=0.0,
    )
    return Trajectory(f"{group:06d}-{member:02d}", f"{group:06d}", "bench", f"t{group}", "train", (turn,), False)


def make_rollouts(
    adapter: FamilyAdapter,
    images: ImageStore,
    *,
    groups: int,
    group_size: int,
    side: int,
    tokens: int,
) -> GenerateOutputs:
    """Return rollouts for `groups` images of `side` pixels. Each image has `group_size` episodes with `tokens` sampled
    tokens."""
    random = np.random.default_rng(0)
    trajectories = []
    for group in range(groups):
        image = Image.fromarray(random.integers(0, 255, (side, side, 3), dtype=np.uint8))
        ref = images.put(encode_png(image))
        runs = adapter.collator.process_image(image)["placeholder_runs"].tolist()
        text = [8] * 12
        ids = np.array(text + [adapter.collator.image_token_id] * runs[0] + text, np.int32)
        for member in range(group_size):
            answer, reward = random.integers(8, 200, tokens), float(random.integers(0, 2))
            trajectories.append(one_turn(group, member, ids, answer, (ref,), reward))
    return GenerateOutputs(trajectories)
