"""What the model is given: one example as its processor makes it, and a batch of rows that hold examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Example:
    """One observation, with the actions that followed it when it is trained on. S tokens, C crops, P image tokens.

    input_ids: (S,), the first token being BOS; no padding.
    image_tokens: (S,), True where the token belongs to an image (its patches, rows and edges).
    pixel_values: (C, patches, pixels of a patch) in [-1, 1], C = 0 without images.
    pooling: (P, 4) patches that make an image token, counted over this example's crops; -1: no patch.
    labels: (S,) for discrete actions, -100 where nothing is learned; None where they are not trained.
    actions: (T, max_action_dim) normalized, zeros beyond the robot's own; None at inference.
    horizon_padding: (T,) True where the chunk is not trained: beyond the data's horizon, or the episode's end where
        the semantics say so. dimension_padding: (max_action_dim,) True beyond the robot's own.
    """

    input_ids: Ints
    image_tokens: Flags
    pixel_values: Floats
    pooling: Ints
    labels: Ints | None
    actions: Floats | None
    horizon_padding: Flags | None
    dimension_padding: Flags

    @property
    def length(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class PolicyBatch:
    """B rows of L tokens that hold E examples, one to a row, or several where rows are packed.

    input_ids, position_ids: (B, L) int64; positions start at 0 in each example, pads have 0.
    example_ids: (B, L) int64, the number (0 to E - 1) of the example that a token belongs to; -1 is padding.
    image_tokens: (B, L) bool.
    pixel_values: (C, patches, pixels of a patch) float32 of all examples in order; pooling: (P, 4) int64 over all C.
    rows: (E,) int64, the row of each example.
    labels: (B, L) int64 or None. actions: (E, T, D) float32 or None; horizon_padding: (E, T) bool or None;
    dimension_padding: (E, D) bool.
    """

    input_ids: Tensor
    position_ids: Tensor
    example_ids: Tensor
    image_tokens: Tensor
    pixel_values: Tensor
    pooling: Tensor
    rows: Tensor
    labels: Tensor | None
    actions: Tensor | None
    horizon_padding: Tensor | None
    dimension_padding: Tensor

    @property
    def examples(self) -> int:
        return self.rows.shape[0]

    def to(self, device: device | str) -> PolicyBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)
