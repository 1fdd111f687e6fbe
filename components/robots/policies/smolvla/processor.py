"""The processor of SmolVLA: encode a robot's observations and actions as model inputs, and decode predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.inputs import (
    ModelProcessor,
    camera_images,
    normalized_actions,
    normalized_state,
    past_end,
    refuse_small_model,
    require_cameras,
)
from armature.components.robots.policies.model import ModelBatch, ModelExample
from armature.components.robots.policies.norm_stats import Flags, Floats, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig


@dataclass(frozen=True)
class SmolVLAExample(ModelExample):
    """An encoded observation, and for training the actions that followed it.

    images: (cameras, 3, height, width) float32 in [-1, 1]. state: (max_state_dim,) float32.
    actions: (T, max_action_dim) float32, normalized and padded. valid: (T,) bool, False after the episode's end.
    """

    images: Floats
    state: Floats
    actions: Floats | None
    valid: Flags | None


@dataclass(frozen=True)
class SmolVLABatch(ModelBatch):
    """Examples as tensors, with text padded on the right. seen: (B, L) bool, False for padding of the text."""

    OBSERVED = ("input_ids", "seen", "images", "state")

    seen: Tensor
    images: Tensor
    state: Tensor
    valid: Tensor | None
    action_dimensions: int

    @property
    def padding(self) -> Tensor:
        """Mask of the text, (B, L) bool, True for padding."""
        return ~self.seen


class SmolVLAProcessor(ModelProcessor):
    """The processor of SmolVLA; see `ModelProcessor`."""

    def __init__(
        self, config: SmolVLAConfig, tokenizer: Any, settings: RobotPolicySettings, robot: RobotMetadata
    ) -> None:
        """
        Raises:
            ConfigurationError: the robot has no cameras or more dimensions than the model, or its statistics do not fit
                the normalization.
        """
        super().__init__(config, tokenizer, settings, robot)
        self.pad_id = tokenizer.pad_token_id or 0
        require_cameras(self.cameras)
        refuse_small_model(
            ("state dimensions", self.state_dimensions, config.max_state_dim),
            ("action dimensions", self.action_dimensions, config.max_action_dim),
        )

    def encode(
        self,
        observation: RobotObservation,
        actions: ArrayLike | None = None,
        padding: ArrayLike | None = None,
        where: str = "",
    ) -> SmolVLAExample:
        """Encode an observation; see `ModelProcessor`. A text that is too long is cut off."""
        images = camera_images(observation, self.cameras, where)
        state = normalized_state(observation, self.state, where, finite=True)
        text = observation.task if observation.task.endswith("\n") else f"{observation.task}\n"
        width, height = self.config.resize_imgs_with_padding
        encoded = valid = None
        if actions is not None:
            normalized = normalized_actions(actions, self.action, self.horizon, where)
            encoded = _padded(normalized, self.config.max_action_dim)
            valid = ~past_end(padding, self.horizon, where)
        return SmolVLAExample(
            input_ids=self.token_ids(text, truncation=True, max_length=self.config.tokenizer_max_length),
            images=np.stack([fitted(image, height, width) for image in images]),
            state=_padded(state, self.config.max_state_dim),
            actions=encoded,
            valid=valid,
        )

    def batch(
        self, examples: Sequence[SmolVLAExample], rows: Sequence[Sequence[int]] | None = None, multiple: int = 1
    ) -> SmolVLABatch:
        """Make a batch with one example in each row; the text's width is a multiple of `multiple`.

        `rows` is always None: the settings refuse packing.
        """
        width = -(-max(example.length for example in examples) // multiple) * multiple
        ids = np.full((len(examples), width), self.pad_id, np.int64)
        for row, example in zip(ids, examples, strict=True):
            row[: example.length] = example.input_ids
        seen = torch.from_numpy(np.arange(width) < np.array([[example.length] for example in examples]))
        stacked: dict[str, Any] = {"seen": seen, "action_dimensions": self.action_dimensions}
        for name in ("images", "state", "actions", "valid"):
            values = [getattr(example, name) for example in examples]
            stacked[name] = None if values[0] is None else torch.from_numpy(np.stack(values))
        return SmolVLABatch(torch.from_numpy(ids), **stacked)


def fitted(image: NDArray[np.uint8], height: int, width: int) -> Floats:
    """Return an image (h, w, 3) as float32 (3, height, width) in [-1, 1], scaled to fit and padded left and above."""
    x = torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1)[None]
    if x.shape[2:] != (height, width):
        ratio = max(x.shape[3] / width, x.shape[2] / height)
        size = max(int(x.shape[2] / ratio), 1), max(int(x.shape[3] / ratio), 1)
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        x = F.pad(x, (width - size[1], 0, height - size[0], 0))
    fit: Floats = (x[0] * 2.0 - 1.0).numpy()
    return fit


def _padded(values: Floats, width: int) -> Floats:
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])
