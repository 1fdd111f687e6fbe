"""Helpers that change the tensors of a checkpoint on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armature.components.training.checkpoints import TENSORS
from armature.components.training.sharded_tensors import ShardedTensors, write

Tensors = dict[str, Tensor]


def read(folder: Path) -> Tensors:
    """Read all tensors of a checkpoint, unsharded."""
    saved = ShardedTensors(folder)
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in saved.specs.items()}
    saved.read(tensors)
    return tensors


def rewrite(path: Path, prefix: str, change: Callable[[Tensors], Any]) -> None:
    """Replace the tensors whose names start with `prefix` by the result of `change`.

    `change` gets a dictionary of these tensors, whose keys are the names without the prefix. It returns such a
    dictionary, or changes its argument and returns None.
    """
    tensors = read(path / TENSORS)
    chosen = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    others = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
    changed = change(chosen) or chosen
    shutil.rmtree(path / TENSORS)
    (path / TENSORS).mkdir()
    write(others | {prefix + name: value for name, value in changed.items()}, path / TENSORS, 0)
