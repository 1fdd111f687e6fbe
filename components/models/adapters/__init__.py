"""Adapters: they turn rollouts into the tensors of a model family. Names that need torch are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from armature.components.contracts.batches import MultimodalAdapter, MultimodalBatch

if TYPE_CHECKING:
    from armature.components.models.adapters.collate import SampleCollator
    from armature.components.models.adapters.family import FamilyAdapter, model_inputs, validate_batch
    from armature.components.models.adapters.select import get_adapter, get_collator

__all__ = [
    "FamilyAdapter",
    "MultimodalAdapter",
    "MultimodalBatch",
    "SampleCollator",
    "get_adapter",
    "get_collator",
    "model_inputs",
    "validate_batch",
]

_MODULES = {
    "FamilyAdapter": "family",
    "SampleCollator": "collate",
    "get_adapter": "select",
    "get_collator": "select",
    "model_inputs": "family",
    "validate_batch": "family",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
