"""Training checkpoints: trained weights, optimizer states, random-number states and the step, on any number of ranks.

Only trained weights are stored; the frozen ones come from the model that the run started with. A checkpoint that N
ranks wrote can be read by any other number of ranks.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armature.components.artifacts.disk import sync, sync_tree
from armature.components.contracts.errors import DataError, TrainerError
from armature.components.contracts.metrics import dump_json
from armature.components.contracts.settings import Settings
from armature.components.training.engine import SkippedUpdates
from armature.components.training.optimizer_state import (
    STATE,
    WEIGHT,
    empty_state,
    refusal,
    refuse_counts,
    state_tensors,
)
from armature.components.training.ranks import Ranks
from armature.components.training.sharded_tensors import NotFiniteError, ShardedTensors, copied, write

FORMAT = 2
STATE_FILE, TENSORS = "state.json", "tensors"
_NAME = re.compile(r"step-(\d{6,})")
_NOT_COMPARED = {"save_every", "keep_checkpoints"}
_SAMPLED = 64
_DELETE = "delete this folder; the run then resumes from the checkpoint before it"


class Resumable(Protocol):
    """An object whose training state `Checkpoints` saves and loads, such as a `TrainingEngine`.

    The parameters of `model` that require a gradient are the trained ones.
    """

    steps_done: int
    """Number of steps that the weights contain."""
    skipped: SkippedUpdates

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


def identity(
    model: nn.Module, settings: Settings, weights: Mapping[str, Tensor] | None = None, **more: Any
) -> dict[str, Any]:
    """Return the facts that a checkpoint and a run resuming from it must share, as a JSON document.

    These are the trainer's settings, the names and shapes of trained parameters, and a digest of the frozen weights.
    The digest covers about 64 values of each frozen parameter, which is enough to tell two models apart without
    reading them completely. Call this before the model is sharded.

    Args:
        weights: the model's weights by name, for a model on the meta device.
        more: further facts to compare.
    """
    digest = sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            flat = (weights[name] if weights else parameter).detach().flatten()
            picked = flat[:: max(1, len(flat) // _SAMPLED)].float().cpu()
            digest.update(name.encode() + picked.numpy().tobytes())
    values = settings.model_dump(mode="json", exclude=_NOT_COMPARED)
    if values.get("lr_scheduler") == "constant":
        del values["max_steps"]
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return {"trainer": values, "frozen_weights": digest.hexdigest(), "trained_weights": trained, **more}


class Checkpoints:
    """The checkpoints of a run, one folder `step-NNNNNN` each. Every rank must call every method.

    `save` copies tensors to the CPU while training waits; a thread then writes them while training continues. Each rank
    writes its own shards and, of tensors that all ranks hold, an equal share.

    Args:
        folder: where the checkpoints are; it must be visible to all ranks.
        who: the result of `identity` for this run.
        keep: number of newest checkpoints to keep.
    """

    def __init__(self, folder: Path, who: Mapping[str, Any], ranks: Ranks, keep: int) -> None:
        self.folder, self.who, self.ranks, self.keep = folder, who, ranks, keep
        self._writers = ranks.another_group()
        self._writing: Future[None] | None = None

    @property
    def newest(self) -> Path | None:
        """The complete checkpoint with the highest step, or None. An incomplete one has another name and is ignored."""
        name = self.ranks.broadcast(max((path.name for path in self._complete()), key=_step, default=None))
        return self.folder / name if name else None

    def save(self, learner: Resumable, state: Mapping[str, Any]) -> Path:
        """Copy the learner's state to the CPU, start writing it to `folder`/step-NNNNNN, and return that path.

        Once it is complete, all but the `keep` newest checkpoints are removed.

        Args:
            state: any JSON document; `load` returns it.

        Raises:
            TrainerError: the checkpoint cannot be started, or the previous one could not be written. Complete
                checkpoints stay as they are.
        """
        self.wait()
        target = self.folder / f"step-{learner.steps_done:06d}"
        new = self.folder / f".new-{target.name}"
        self._agree(self.ranks, target, lambda: _empty_folder(new / TENSORS) if self.ranks.first else None)
        document = {"format": FORMAT, "step": learner.steps_done, "identity": self.who, "state": state}
        document["skipped"] = asdict(learner.skipped)
        text, tensors = dump_json(document, indent=1), copied(self._tensors_to_write(learner))
        self._writing = _in_thread(lambda: self._write(tensors, text, new, target))
        return target

    def wait(self) -> None:
        """Block until the last checkpoint that `save` started is on the disk.

        Raises:
            TrainerError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, learner: Resumable, path: Path) -> dict[str, Any]:
        """Restore `learner` from the checkpoint in `path` and return the `state` that was saved with it.

        A rank that did not exist when the checkpoint was written keeps its random-number state.

        Raises:
            DataError: the checkpoint is damaged, or belongs to another model, other settings or another format.
        """
        document = self._document(path)
        where = path / TENSORS
        trained = _trained(learner)
        rng = _rng(self.ranks.rank)
        try:
            shards = ShardedTensors(where)
            state = empty_state(shards.specs, learner.optimizer, trained, where)
            slots = {f"{STATE}{name}|{slot}": v for name, tensors in state.items() for slot, v in tensors.items()}
            weights = {WEIGHT + name: parameter.detach() for name, parameter in trained.items()}
            rng = {name: value for name, value in rng.items() if name in shards.specs}
            # Check everything before anything of the learner changes: a damaged checkpoint must leave it as it was.
            shards.check_finite(weights | slots)
            shards.read(slots | rng)
            refuse_counts(((name, tensors["step"]) for name, tensors in state.items()), where)
            shards.read(weights)
        except NotFiniteError as error:
            name = str(error).removeprefix(WEIGHT).removeprefix(STATE)
            raise refusal(f"{name} has NaN or infinite values", where) from error
        except (OSError, ValueError, RuntimeError) as error:
            raise _unreadable(error, path) from error
        for name, parameter in trained.items():
            learner.optimizer.state[parameter] = state.get(name, {})
        _restore_rng(rng)
        learner.steps_done = document["step"]
        learner.skipped = SkippedUpdates(**document["skipped"])
        saved_state: dict[str, Any] = document["state"]
        return saved_state

    def _tensors_to_write(self, learner: Resumable) -> dict[str, Tensor]:
        """Return the tensors that this rank writes.

        Ranks that hold the same data, as whole tensors or as copies of a shard, take turns, so each writes its share.
        """
        tensors = state_tensors(learner.optimizer, _trained(learner))
        chosen = {}
        for number, (name, value) in enumerate(tensors.items()):
            holder, holders = self._holder_of(value)
            if number % holders == holder:
                chosen[name] = value
        return chosen | _rng(self.ranks.rank)

    def _holder_of(self, value: Tensor) -> tuple[int, int]:
        """Return this rank's number among the ranks that hold the same data of `value`, and the number of them."""
        if not isinstance(value, DTensor):
            return self.ranks.rank, self.ranks.size
        mesh = value.device_mesh
        return (mesh.get_local_rank("replicate"), mesh.size(0)) if mesh.ndim > 1 else (0, 1)

    def _write(self, tensors: Mapping[str, Tensor], document: bytes, new: Path, target: Path) -> None:
        """Write a checkpoint to the folder `new`, and rename it to `target` once all of it is on the disk."""

        def publish() -> None:
            (new / STATE_FILE).write_bytes(document)
            sync_tree(new)
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
            sync(target.parent)
            for old in sorted(self._complete(), key=lambda path: _step(path.name))[: -self.keep]:
                shutil.rmtree(old)

        try:
            self._agree(self._writers, target, lambda: write(tensors, new / TENSORS, self.ranks.rank))
            self._agree(self._writers, target, publish if self.ranks.first else None)
        except TrainerError:
            if self.ranks.first:
                shutil.rmtree(new, ignore_errors=True)
            raise

    def _agree(self, ranks: Ranks, target: Path, act: Callable[[], Any] | None) -> None:
        """Run `act` on this rank unless it is None. If it fails on any rank, raise an error on all ranks."""
        failure = None
        try:
            if act is not None:
                act()
        except (OSError, ValueError, RuntimeError) as error:
            failure = str(error)
        if failures := [one for one in ranks.gather(failure) if one is not None]:
            newest = max((path.name for path in self._complete()), key=_step, default="none")
            raise TrainerError(
                f"checkpoint {target.name} could not be written: {failures[0]}",
                code="checkpoint_not_written",
                where=str(self.folder),
                remedy=f"make room on the disk; the newest complete checkpoint is {newest}",
            )

    def _complete(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]

    def _document(self, path: Path) -> dict[str, Any]:
        """Read the checkpoint's state.json, and refuse it if it is damaged or belongs to another run."""
        try:
            document = json.loads((path / STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise _unreadable(error, path) from error
        if not isinstance(document, dict) or not {"format", "step", "identity", "state"} <= document.keys():
            raise DataError(
                "this file does not describe a checkpoint",
                code="checkpoint_damaged",
                where=str(path / STATE_FILE),
                remedy=_DELETE,
            )
        if document["format"] != FORMAT:
            raise DataError(
                f"the checkpoint has format {document['format']}, but this version reads format {FORMAT}",
                code="checkpoint_format_mismatch",
                where=str(path),
                remedy="delete this folder; the run then applies its stored batches again",
            )
        if not _counts_and_state(document):
            raise DataError(
                "the step, the counts of skipped updates, or the state is damaged",
                code="checkpoint_damaged",
                where=str(path / STATE_FILE),
                remedy=_DELETE,
            )
        differing = _differences(document["identity"], json.loads(json.dumps(self.who)))
        if differing:
            raise DataError(
                f"the checkpoint belongs to another model or other settings: {'; '.join(differing[:8])}",
                code="checkpoint_mismatch",
                where=str(path),
                remedy="resume with the settings that the checkpoint was made with, or start in an empty folder",
            )
        return document


def _in_thread(act: Callable[[], None]) -> Future[None]:
    """Run `act` in a daemon thread and return its future.

    It is a daemon thread, because a rank that fails must be able to exit even if this thread waits for the other ranks
    forever.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            act()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _unreadable(error: Exception, path: Path) -> DataError:
    return DataError(
        f"the checkpoint is not readable: {error}", code="checkpoint_unreadable", where=str(path), remedy=_DELETE
    )


def _counts_and_state(document: Mapping[str, Any]) -> bool:
    """Check that the fields of a checkpoint's document, besides tensors, have the types that `save` writes."""
    skipped = document.get("skipped")
    if not isinstance(skipped, dict) or skipped.keys() != asdict(SkippedUpdates()).keys():
        return False
    counts = [document["step"], *skipped.values()]
    return isinstance(document["state"], dict) and all(type(each) is int and each >= 0 for each in counts)


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _trained(learner: Resumable) -> dict[str, nn.Parameter]:
    return {name: p for name, p in learner.model.named_parameters() if p.requires_grad}


def _rng(rank: int) -> dict[str, Tensor]:
    states = {f"rng/{rank}/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"rng/{rank}/cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(state)


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)
    path.mkdir(parents=True)


def _differences(saved: Any, now: Any, name: str = "") -> list[str]:
    """Return a phrase "FIELD was X, is Y" for each field in which two JSON documents differ."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [text for key in keys for text in _differences(saved.get(key), now.get(key), f"{name}.{key}")]
    return [] if saved == now else [f"{name.lstrip('.')} was {saved!r}, is {now!r}"]
