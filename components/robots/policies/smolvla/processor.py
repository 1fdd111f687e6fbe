"""The processor of SmolVLA: encode a robot's observations and actions as model inputs, and decode predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.inputs import (
    camera_images,
    normalized_actions,
    normalized_state,
    past_end,
    refuse_small_model,
)
from armature.components.robots.policies.model import ModelBatch
from armature.components.robots.policies.norm_stats import Flags, Floats, Normalizer, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.smolvla.configuration import SmolVLAConfig

_TOKENIZER_LOCK = Lock()  # a fast tokenizer raises if two threads use it


@dataclass(frozen=True)
class SmolVLAExample:
    """An encoded observation, and for training the actions that followed it.

    input_ids: (L,) int64. images: (cameras, 3, height, width) float32 in [-1, 1]. state: (max_state_dim,) float32.
    actions: (T, max_action_dim) float32, normalized and padded. valid: (T,) bool, False after the episode's end.
    """

    input_ids: NDArray[np.int64]
    images: Floats
    state: Floats
    actions: Floats | None
    valid: Flags | None

    @property
    def length(self) -> int:
        """Number of text tokens."""
        return len(self.input_ids)


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
    def examples(self) -> int:
        """Number of examples."""
        return len(self.state)

    @property
    def padding(self) -> Tensor:
        """Mask of the text, (B, L) bool, True for padding."""
        return ~self.seen


class SmolVLAProcessor:
    """Encodes observations of one robot and decodes predictions into its actions.

    cameras: camera keys in the model's order.
    """

    def __init__(
        self, config: SmolVLAConfig, tokenizer: Any, settings: RobotPolicySettings, robot: RobotMetadata, pad_id: int
    ) -> None:
        """
        Raises:
            ConfigurationError: the robot has no cameras or more dimensions than the model, or its statistics do not fit
                the normalization.
        """
        self.config, self.tokenizer, self.settings, self.pad_id = config, tokenizer, settings, pad_id
        self.cameras = settings.image_keys or robot.camera_keys
        self.horizon = settings.chunk_size
        self.state = Normalizer.build("state", robot.state_stats, settings.state_normalization, True)
        self.action = Normalizer.build("action", robot.action_stats, settings.action_normalization, True)
        self.state_dimensions, self.action_dimensions = self.state.dimensions, self.action.dimensions
        refuse_small_model(
            ("state dimensions", self.state_dimensions, config.max_state_dim),
            ("action dimensions", self.action_dimensions, config.max_action_dim),
        )
        if not self.cameras:
            raise ConfigurationError(
                "the policy has no cameras",
                code="cameras_missing",
                where="policy.image_keys",
                remedy="set it to the cameras in the policy's order",
            )

    def encode(
        self,
        observation: RobotObservation,
        actions: ArrayLike | None = None,
        padding: ArrayLike | None = None,
        where: str = "",
    ) -> SmolVLAExample:
        """Encode an observation, and for training the actions (T, dimensions) that followed it.

        Args:
            padding: (T,) True for steps after the end of the episode.
            where: Dataset, episode and frame, for error messages.

        Raises:
            DataError: a camera is missing, a shape is wrong, or a number is not finite.
        """
        images = camera_images(observation, self.cameras, where)
        state = normalized_state(observation, self.state, where)
        if not np.isfinite(state).all():
            raise DataError(
                f"state {self.state.names[int(np.argmin(np.isfinite(state)))]!r} is not finite",
                code="observation_not_finite",
                where=where,
                remedy="correct the frame, or leave out its episode",
            )
        text = observation.task if observation.task.endswith("\n") else f"{observation.task}\n"
        with _TOKENIZER_LOCK:
            ids = self.tokenizer(text, truncation=True, max_length=self.config.tokenizer_max_length)["input_ids"]
        width, height = self.config.resize_imgs_with_padding
        encoded = valid = None
        if actions is not None:
            normalized = normalized_actions(actions, self.action, self.horizon, where)
            encoded = _padded(normalized, self.config.max_action_dim)
            valid = ~past_end(padding, self.horizon, where)
        return SmolVLAExample(
            input_ids=np.array(ids, np.int64),
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
        for row, example in enumerate(examples):
            ids[row, : example.length] = example.input_ids
        lengths = np.array([[example.length] for example in examples])
        stacked: dict[str, Any] = {}
        for name in ("images", "state", "actions", "valid"):
            values = [getattr(example, name) for example in examples]
            stacked[name] = None if values[0] is None else torch.from_numpy(np.stack(values))
        seen = torch.from_numpy(np.arange(width) < lengths)
        return SmolVLABatch(torch.from_numpy(ids), seen=seen, **stacked, action_dimensions=self.action_dimensions)

    def decode(self, chunks: Floats) -> Floats:
        """Return actions (N, T, dimensions) in the dataset's units from predictions (N, T, max_action_dim)."""
        return self.action.restore(chunks[..., : self.action_dimensions])


def fitted(image: NDArray[np.uint8], height: int, width: int) -> Floats:
    """Return an image (h, w, 3) as float32 (3, height, width) in [-1, 1], scaled to fit and padded left and above."""
    x = torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1)[None]
    if x.shape[2:] != (height, width):
        ratio = max(x.shape[3] / width, x.shape[2] / height)
        size = int(x.shape[2] / ratio), int(x.shape[3] / ratio)
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        x = F.pad(x, (width - size[1], 0, height - size[0], 0))
    fit: Floats = (x[0] * 2.0 - 1.0).numpy()
    return fit


def _padded(values: Floats, width: int) -> Floats:
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])
