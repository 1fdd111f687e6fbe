"""How many tokens an example may have."""

from __future__ import annotations

import math

_PROMPT, _TASK, _MARGIN, _MULTIPLE = 80, 32, 32, 64
_IMAGE, _USUAL_IMAGES = 196, 2
_ACTION_WRAPPING, _PER_STEP, _PER_DIMENSION = 4, 6, 0.95


def sequence_budget(
    images: int, state_dimensions: int, action_dimensions: int, horizon: int, discrete: bool, image_tokens: int = _IMAGE
) -> int:
    """The limit that the released code derives from an example's parts.

    Args:
        images: 0 counts as two.
        discrete: Whether action tokens are part of the example.
        image_tokens: Of an image; fewer than the released model's count as its 196.
    """
    tokens = max(_IMAGE, image_tokens) * (images or _USUAL_IMAGES) + _PROMPT + _TASK + state_dimensions + _MARGIN
    if discrete:
        tokens += _ACTION_WRAPPING + horizon * max(_PER_STEP, math.ceil(_PER_DIMENSION * action_dimensions))
    return math.ceil(tokens / _MULTIPLE) * _MULTIPLE
