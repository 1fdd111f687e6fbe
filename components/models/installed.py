"""Which packages for GPUs are installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from armature.components.sources.data import versions

TRITON = find_spec("triton") is not None
"""Whether the kernels of this project can be compiled."""


@cache
def is_installed(distribution: str) -> bool:
    """Tells flash-attn from flash-attn-4, which both have modules below `flash_attn`."""
    return bool(versions(distribution)[distribution])
