"""The engine is tested through the trainer of tokens."""

from tests.vlm.conftest import make_tiny, tiny

__all__ = ["make_tiny", "tiny"]
