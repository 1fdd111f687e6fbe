"""Tensors of a policy's checkpoint: read one at a time from its safetensors files, after a check of all names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from armature.components.artifacts.tensors import INDEX, open_tensors, shard_names
from armature.components.contracts.errors import DataError
from armature.components.robots.policies.model import PolicyModel

SINGLE, VALUE_HEAD_FILE = "model.safetensors", "value_head.safetensors"
VALUE_HEAD = "value_head."
LISTED = 3  # number of names in an error message


class Tensors(Protocol):
    """Lazily read tensors of a checkpoint, under their released names."""

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading the tensor."""

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor."""


class TensorFiles:
    """Tensors of a folder with the safetensors file `single`, or with shards and their index; a context manager.

    Raises:
        DataError: there is no such file, or the index and the shards disagree.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self._folder, self._stack = folder, ExitStack()
        index = folder / INDEX
        if single == SINGLE and index.is_file():
            self._files = shard_names(index)
        elif (folder / single).is_file():
            with open_tensors(folder / single, "pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise DataError(
                f"the folder has neither {single} nor {INDEX}",
                code="safetensors_missing",
                where=str(folder),
                remedy="use a folder with a policy's safetensors",
            )

    def __enter__(self) -> Self:
        self._open: dict[str, Any] = {}
        for shard in sorted(set(self._files.values())):
            self._open[shard] = self._stack.enter_context(open_tensors(self._folder / shard, "pt"))
            listed = {name for name, file in self._files.items() if file == shard}
            _refuse("index and shard disagree about", sorted(listed ^ set(self._open[shard].keys())), str(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading the tensor."""
        return tuple(self._open[self._files[name]].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self._files[name]].get_tensor(name)
        return tensor


def refuse_others(expected: Mapping[str, Tensor], tensors: Tensors, where: str) -> None:
    """Check that `tensors` has exactly the weights `expected`, with their shapes.

    Raises:
        DataError: it has not.
    """
    _refuse("the checkpoint lacks weights", sorted(expected.keys() - tensors.names), where)
    _refuse(
        "the checkpoint has weights that do not belong to its config.json",
        sorted(tensors.names - expected.keys()),
        where,
    )
    for name, tensor in expected.items():
        if tuple(tensor.shape) != tensors.shape(name):
            raise DataError(
                f"{name} has the shape {tensors.shape(name)}, config.json requires {tuple(tensor.shape)}",
                code="weights_mismatch",
                where=where,
                remedy="use weights that belong to this config.json",
            )


def _refuse(what: str, names: list[str], where: str = "") -> None:
    if names:
        shown = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
        raise DataError(
            f"{what}: {shown}",
            code="weights_mismatch",
            where=where,
            remedy="use a complete checkpoint with the config.json that it was trained with",
        )


@torch.no_grad()
def copy_weights(folder: Path, into: Mapping[str, Tensor], single: str = SINGLE) -> None:
    """Copy the weights of a checkpoint into tensors, which are given by the names that the weights are stored under.

    Raises:
        DataError: a weight is missing, unknown, or has another shape.
    """
    with TensorFiles(folder, single) as files:
        refuse_others(into, files, str(folder / single))
        for name, tensor in into.items():
            tensor.copy_(files[name])


# --- The value head, which has a file of its own because only further training needs it ---


def save_value_head(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the value head among `weights`, if there is one, to `folder`."""
    if head := {name: tensor.cpu() for name, tensor in weights.items() if name.startswith(VALUE_HEAD)}:
        save_file(head, folder / VALUE_HEAD_FILE)


def load_value_head(model: PolicyModel, folder: Path) -> None:
    """Copy the value head in `folder` into the model's, if the model has one.

    Raises:
        DataError: a weight is missing, unknown, or has another shape.
    """
    if model.value_head is not None:
        state = {VALUE_HEAD + name: tensor for name, tensor in model.value_head.state_dict().items()}
        copy_weights(folder, state, VALUE_HEAD_FILE)
