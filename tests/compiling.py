"""Compiled layers in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch


def trace_only(patch: pytest.MonkeyPatch) -> None:
    """Let layers become graphs, forward and backward, of torch's own kernels: making others takes a minute on a CPU."""
    plain = torch.compile

    def traced(function: Callable[..., Any], *, dynamic: bool | None, options: Mapping[str, Any]) -> Callable[..., Any]:
        return plain(function, dynamic=dynamic, backend="aot_eager")

    patch.setattr(torch, "compile", traced)
