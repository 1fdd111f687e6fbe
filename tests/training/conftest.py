"""Fixtures of the training engine's tests, which mostly run it with a tiny vision-language model."""

from tests.vlm.conftest import make_tiny, tiny

__all__ = ["make_tiny", "tiny"]
