"""Weights that stay in their files until they are asked for, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
_PEFT = "base_model.model."


def hollow(model: Model) -> Model:
    """`model`, from the meta device, on the CPU: its tensors have shapes and dtypes, and one number each in memory.

    Layers can be added to it that are real, with the random numbers that they would have had in a whole model.
    """
    model._apply(lambda t: torch.empty((), dtype=t.dtype).expand(t.shape) if t.is_meta else t)
    return model


class MappedWeights(Mapping[str, Tensor]):
    """All parameters and buffers of a model by name, in its dtypes.

    Args:
        model: one that `hollow` made, which may have got adapters since.
        stored: what the files have for it, by the names without adapters, in any dtype. Views of mapped files take no
            memory of their own.
        attribute: of a module around the model, whose names are wanted; empty: the model's own.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, Tensor], attribute: str = "") -> None:
        self._model, self._stored = model, stored
        self._own = model.state_dict(prefix=f"{attribute}." if attribute else "")
        self._prefix = (f"{attribute}." if attribute else "") + (_PEFT if isinstance(model, PeftModel) else "")

    def of(self, attribute: str) -> MappedWeights:
        """The same by the names in a module that has the model as `attribute`."""
        return MappedWeights(self._model, self._stored, attribute)

    def __getitem__(self, name: str) -> Tensor:
        own = self._own[name]
        stored = self._stored.get(name.removeprefix(self._prefix).replace(".base_layer.", "."))
        return own if stored is None else stored.to(own.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)
