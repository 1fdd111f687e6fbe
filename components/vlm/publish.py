"""The policy's weights as a folder that a model server can load."""

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

from armature.components.artifacts.tensors import checkpoint_folder
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
from armature.components.training.ranks import Ranks, whole

# The folders of a series of versions of the weights: which are kept, and what changed from one to the next.

KEEP_VERSIONS = 2


def remove_old_versions(series: Path, needed: Path | None = None) -> None:
    """All whose name is a number, but the newest two, and `needed` and those after it."""
    versions = sorted((path for path in series.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    for old in versions[:-KEEP_VERSIONS]:
        if needed is None or int(old.name) < int(needed.name):
            shutil.rmtree(old)


class DeltaSeries:
    """Writes versions as what changed since the one before; every rank calls it, the first one writes.

    The first rank has the last version in main memory.
    """

    def __init__(self) -> None:
        self._checkpoint: Path | None = None
        self._last: Path | None = None
        self._held: HostWeights | None = None
        self._room = 0

    def begin(self, checkpoint: Path, ranks: Ranks) -> None:
        """Take the checkpoint in this folder, a version like those to come, for the one before the next.

        The series before stays until the next version: servers may still be started from it.
        """
        if ranks.first:
            if self._held is not None:
                self._held.close()
            self._held = HostWeights.read(checkpoint)
            remove_old_versions(checkpoint.parent, self._checkpoint)
            self._room = _size(checkpoint)
        self._checkpoint = self._last = checkpoint

    def add(self, folder: Path, new: Iterable[tuple[str, Tensor]], ranks: Ranks) -> bool:
        """Write a version into `folder`, atomically; `new` are its weights under the names in the files.

        Nothing is written, and False returned, where a checkpoint has to come first: `folder` does not follow the
        last version, or what changed since the last checkpoint is together larger than that.
        """
        last = self._last
        if last is None or last.parent != folder.parent or int(last.name) >= int(folder.name):
            return False
        self._last = None  # of no use if this fails
        if not ranks.broadcast(self._write(folder, last, new) if ranks.first else _gathered(new)):
            return False
        if ranks.first:
            remove_old_versions(folder.parent, self._checkpoint)
        self._last = folder
        return True

    def _write(self, folder: Path, last: Path, new: Iterable[tuple[str, Tensor]]) -> bool:
        assert self._held is not None
        with checkpoint_folder(folder) as made:
            self._room -= write_delta(made, self._held, last.name, new)
        return self._room >= 0


def _gathered(tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Take part in gathering them."""
    return all(True for _ in tensors)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


class Publisher:
    """Writes complete checkpoints in the Hugging Face layout, adapters merged in, or lists the same tensors.

    One that is not a version of a series also has the adapters alone, in the folder `adapter`.
    The weights have the dtypes that the model had when this was made, before the trainer made fp32 of them.
    The processor's files are written once, into `processor_folder`, and hard-linked from then on.
    """

    def __init__(self, model: nn.Module, processor: Any, processor_folder: Path) -> None:
        self._dtypes = weight_dtypes(model)
        self._processor, self._processor_folder = processor, processor_folder
        self._renamed: dict[str, str] | None = None
        self.series = DeltaSeries()

    @property
    def float32(self) -> bool:
        """Whether all that is published is."""
        return set(self._dtypes.values()) == {torch.float32}

    def publish(self, model: nn.Module, folder: Path, ranks: Ranks) -> None:
        """Write `folder`, atomically. Every rank calls it; rank 0 writes.

        A folder whose name is a number is one version of a series: of its siblings the newest two stay.
        """
        self._write(model, folder, ranks)
        if ranks.first and folder.name.isdecimal():
            remove_old_versions(folder.parent)

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
        """Write one version of a series as what changed since the last, or as `publish` does; see `DeltaSeries`."""
        if not self.series.add(folder, self._whole_tensors(cast(Any, model)), ranks):
            self._write(model, folder, ranks)
            self.series.begin(folder, ranks)

    def publish_adapter(self, model: nn.Module, folder: Path, ranks: Ranks) -> None:
        """Write the adapters of one version of a series, as `publish` writes the weights.

        In the data type of the layers that they belong to, in which servers hold them.

        Raises:
            ConfigurationError: there are none.
        """
        if not isinstance(model, PeftModel):
            raise ConfigurationError(
                "there are no adapters to write",
                code="adapters_missing",
                where="model.lora",
                remedy="publish the weights",
            )
        weights = adapter_weights(model, whole)
        if ranks.first:
            typed = {name: value.to(self._dtypes[layer_of(name)]) for name, value in weights.items()}
            with checkpoint_folder(folder) as new:
                write_adapter(new, model, typed)
            remove_old_versions(folder.parent)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """What `publish` writes, on the model's device; sharded weights as DTensors.

        Under the names in the files, but of Molmo2 under those in the model: there the files have tensors that are
        joined and cut out of these, and servers know both.
        """
        base = base_model(cast(Any, model))
        weights = self._weights(cast(Any, model), Tensor.detach)
        tied = {name for name, source in base.all_tied_weights_keys.items() if weights[name] is weights[source]}
        if has_hub_layout(base.config):
            return weights
        weights = {name: weight for name, weight in weights.items() if name not in tied}
        if self._renamed is not None:
            return {file: weights[name] for file, name in self._renamed.items()}
        written = revert_weight_conversion(base, weights)  # compiles an expression for each name: 60 ms of 800
        names = {id(weight): name for name, weight in weights.items()}
        if all(id(weight) in names for weight in written.values()):
            self._renamed = {file: names[id(weight)] for file, weight in written.items()}
        return written

    def _whole_tensors(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Under the names in the files, unsharded: every rank takes all of them."""
        config = base_model(model).config
        if has_hub_layout(config):
            yield from to_hub(self._weights(model, whole), config).items()
            return
        for name, tensor in self.tensors(model).items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def _weights(self, model: Any, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """By name in the model, each as `take` gives it; parameters that share memory still do."""
        held, first = base_model(model).state_dict(), dict[Any, str]()
        weights: dict[str, Tensor] = {}
        for name, value in merged_weights(model):
            own = held.get(name)  # None of a layer with adapters, whose merged weight is of a moment
            shared = name if own is None or not own.numel() else first.setdefault((_address(own), own.shape), name)
            weights[name] = weights[shared] if shared in weights else take(value).to(self._dtypes[name])
        return weights


class _FilesBeside:
    """Has the one method of a processor that writing a checkpoint needs: links its files, and writes the adapter."""

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
    return (value.to_local() if isinstance(value, DTensor) else value).data_ptr()
