"""GRPO and its relatives for vision-language models. Names that need torch are imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from components.contracts.batches import MultimodalBatch

if TYPE_CHECKING:
    from components.adapters.base import MultimodalAdapter
    from components.training.client import TrainerClient
    from components.training.learner import Learner

__all__ = [
    "Learner",
    "MultimodalAdapter",
    "MultimodalBatch",
    "TrainerClient",
]

_MODULES = {
    "Learner": "components.training.learner",
    "MultimodalAdapter": "components.adapters.base",
    "TrainerClient": "components.training.client",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
