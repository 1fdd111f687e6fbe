"""Publishing the trained weights: as checkpoints that model servers load, as deltas, as adapters, or as tensors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from armature.components.artifacts.tensors import new_checkpoint_folder
from armature.components.contracts.errors import ConfigurationError
from armature.components.inference.served.armature_served.deltas import HostWeights, write_delta
from armature.components.models.load import save_checkpoint
from armature.components.models.lora import (
    adapter_weights,
    base_model,
    layer_of,
    merged_weights,
    weight_dtypes,
    write_adapter,
)
from armature.components.models.molmo2 import has_hub_layout, to_hub
from armature.components.models.source import ADAPTER
from armature.components.training.optimizer_state import local_tensor
from armature.components.training.ranks import Ranks, whole

KEEP_VERSIONS = 2
"""Number of newest versions that are kept in a series."""


def remove_other_versions(newest: Path, needed: Path | None = None) -> None:
    """Delete the versions (folders with a number as name) beside `newest`, except it and the `KEEP_VERSIONS` - 1 before
    it.

    Later ones are of a training in this folder that begins again, and so makes these versions again.

    Args:
        needed: also keep this version and the versions from it to `newest`.
    """
    versions = sorted((int(path.name), path) for path in newest.parent.iterdir() if path.name.isdecimal())
    last = int(newest.name)
    first = min([number for number, _ in versions if number <= last][-KEEP_VERSIONS:])
    if needed is not None:
        first = min(first, int(needed.name))
    for number, path in versions:
        if not first <= number <= last:
            shutil.rmtree(path)


class DeltaSeries:
    """Writes versions of the weights as the changes since the previous version. Every rank calls it, rank 0 writes.

    Rank 0 keeps the previous version in main memory to compare with.
    """

    def __init__(self) -> None:
        self._checkpoint: Path | None = None
        self._last: Path | None = None
        self._held: HostWeights | None = None
        self._room = 0

    def begin(self, checkpoint: Path, ranks: Ranks) -> None:
        """Start a series from the complete checkpoint in `checkpoint`, one of the folders of the versions.

        The previous series is deleted with the next version, because servers may still be starting from it.
        """
        if ranks.first:
            if self._held is not None:
                self._held.close()
            self._held = HostWeights.read(checkpoint)
            remove_other_versions(checkpoint, self._checkpoint)
            self._room = _size(checkpoint)
        self._checkpoint = self._last = checkpoint

    def add(self, folder: Path, new: Iterable[tuple[str, Tensor]], ranks: Ranks) -> bool:
        """Write a version to `folder`, atomically.

        Args:
            new: all weights of the version, under their names in checkpoint files.

        Returns:
            False if nothing was written because a complete checkpoint has to come first: `folder` does not follow the
            previous version, or all changes since the last checkpoint together are larger than the checkpoint.
        """
        last = self._last
        if last is None or last.parent != folder.parent or int(last.name) >= int(folder.name):
            return False
        self._last = None  # if writing fails, the state in memory no longer matches any version
        if not ranks.broadcast(self._write(folder, last, new) if ranks.first else _gathered(new)):
            return False
        if ranks.first:
            remove_other_versions(folder, self._checkpoint)
        self._last = folder
        return True

    def _write(self, folder: Path, last: Path, new: Iterable[tuple[str, Tensor]]) -> bool:
        assert self._held is not None
        with new_checkpoint_folder(folder) as made:
            self._room -= write_delta(made, self._held, last.name, new)
        return self._room >= 0


def _gathered(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Iterate over `tensors`, whose sharded weights are gathered meanwhile, and drop them. The result is True.

    Ranks that do not write call this, because all ranks must take part in gathering.
    """
    return all(True for _ in tensors)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


class Publisher:
    """Writes complete checkpoints in the Hugging Face layout, with adapters merged into the weights.

    It can also return the tensors of such a checkpoint without writing it. The final checkpoint, unlike the versions
    for the servers, also has the adapters alone, in the folder `adapter`.

    Args:
        model: the model before training. Weights are published in its current dtypes; the trainer may convert the model
            to fp32 afterwards.
        processor_folder: the processor's files are written there once, and hard-linked into each checkpoint.
    """

    def __init__(self, model: nn.Module, processor: Any, processor_folder: Path) -> None:
        self._dtypes = weight_dtypes(model)
        self._processor, self._processor_folder = processor, processor_folder
        self._renamed: dict[str, str] | None = None
        self.series = DeltaSeries()

    @property
    def float32(self) -> bool:
        """True if all published weights are fp32."""
        return set(self._dtypes.values()) == {torch.float32}

    def publish(self, model: nn.Module, folder: Path, ranks: Ranks) -> None:
        """Write a checkpoint to `folder`, atomically. Every rank calls it; rank 0 writes.

        A folder whose name is a number is a version of a series, of which only the newest two are kept.
        """
        self._write(model, folder, ranks)
        if ranks.first and folder.name.isdecimal():
            remove_other_versions(folder)

    def _write(self, model: nn.Module, folder: Path, ranks: Ranks) -> None:
        weights, one_of_many = self._weights(cast(Any, model), whole), folder.name.isdecimal()
        adapter = None
        if isinstance(model, PeftModel) and not one_of_many:
            adapter = partial(write_adapter, model=model, weights=adapter_weights(model, whole))
        if ranks.first:
            if not self._processor_folder.exists():
                self._processor.save_pretrained(self._processor_folder)
            beside = cast(Any, _FilesBeside(self._processor_folder, adapter))
            save_checkpoint(base_model(cast(Any, model)), beside, folder, weights)

    def publish_delta(self, model: nn.Module, folder: Path, ranks: Ranks) -> None:
        """Write a version as the changes since the previous one, or completely if needed; see `DeltaSeries.add`."""
        if not self.series.add(folder, self._whole_tensors(cast(Any, model)), ranks):
            self._write(model, folder, ranks)
            self.series.begin(folder, ranks)

    def publish_adapter(self, model: nn.Module, folder: Path, ranks: Ranks) -> None:
        """Write only the adapters of a version of a series, atomically.

        They are written in the dtype of the layers that they belong to, which is the dtype that servers use.

        Raises:
            ConfigurationError: the model has no adapters.
        """
        if not isinstance(model, PeftModel):
            raise ConfigurationError(
                "the model has no adapters to write",
                code="adapters_missing",
                where="model.lora",
                remedy="publish the weights instead",
            )
        weights = adapter_weights(model, whole)
        if ranks.first:
            typed = {name: value.to(self._dtypes[layer_of(name)]) for name, value in weights.items()}
            with new_checkpoint_folder(folder) as new:
                write_adapter(new, model, typed)
            remove_other_versions(folder)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that `publish` writes, on the model's device; sharded weights as DTensors.

        They have their names in checkpoint files. Molmo2 is an exception, because the tensors in its files are made by
        joining and cutting the model's tensors. For Molmo2 the names and tensors are the model's own, which servers
        accept too.
        """
        base = base_model(cast(Any, model))
        weights = self._weights(cast(Any, model), Tensor.detach)
        tied = {name for name, source in base.all_tied_weights_keys.items() if weights[name] is weights[source]}
        if has_hub_layout(base.config):
            return weights
        weights = {name: weight for name, weight in weights.items() if name not in tied}
        if self._renamed is not None:
            return {file: weights[name] for file, name in self._renamed.items()}
        # This compiles a regular expression for each name, 60 ms of the 800 ms of a sync: remember the result.
        written = revert_weight_conversion(base, weights)
        names = {id(weight): name for name, weight in weights.items()}
        if all(id(weight) in names for weight in written.values()):
            self._renamed = {file: names[id(weight)] for file, weight in written.items()}
        return written

    def _whole_tensors(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded weights under their names in checkpoint files.

        Every rank has to iterate over all of them.
        """
        config = base_model(model).config
        if has_hub_layout(config):
            yield from to_hub(self._weights(model, whole), config).items()
            return
        for name, tensor in self.tensors(model).items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def _weights(self, model: Any, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return `take(tensor)` for each of the model's weights, by the weight's name in the model.

        Parameters that share memory still share it in the result.
        """
        state, first = base_model(model).state_dict(), dict[Any, str]()
        weights: dict[str, Tensor] = {}
        for name, value in merged_weights(model):
            # A layer with adapters is not in `state` under its name; its merged weight exists only now.
            stored = state.get(name)
            key = None if stored is None or not stored.numel() else (_address(stored), stored.shape)
            shared = name if key is None else first.setdefault(key, name)
            weights[name] = weights[shared] if shared in weights else take(value.to(self._dtypes[name]))
        return weights


class _FilesBeside:
    """Is passed in place of a processor to the function that saves a checkpoint, which calls `save_pretrained`.

    That links the processor's files, which exist already, into the new folder and writes the adapters beside them.
    """

    def __init__(self, folder: Path, adapter: Callable[[Path], None] | None) -> None:
        self.folder, self.adapter = folder, adapter

    def save_pretrained(self, target: Path) -> None:
        for path in self.folder.rglob("*"):
            new = Path(target) / path.relative_to(self.folder)
            if path.is_dir():
                new.mkdir(exist_ok=True)
            else:
                os.link(path, new)
        if self.adapter is not None:
            self.adapter(Path(target) / ADAPTER)


def _address(value: Tensor) -> int:
    return local_tensor(value).data_ptr()
