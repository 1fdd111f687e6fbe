"""Checkpoints to resume from: what is trained, the optimizer, random numbers and position, without pickle."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from components.artifacts.disk import sync, sync_tree
from components.contracts.errors import DataError, TrainerError
from components.contracts.numbers import dump_json
from components.training.ranks import Ranks, like, whole
from components.training.settings import TrainerSettings
from components.training.skipped import SkippedUpdates
from components.training.tensors import checked_state, checked_weights, optimizer_tensors, restore_state

FORMAT = 1
STATE_FILE, MODEL_FILE, OPTIMIZER_FILE, RNG_FILE = (
    "state.json",
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
)
_NAME = re.compile(r"step-(\d{6,})")
_NOT_COMPARED = {"save_every", "keep_checkpoints"}
_SAMPLED = 64


class CheckpointPolicy(Protocol):
    """The setting that says how many checkpoints stay."""

    @property
    def keep_checkpoints(self) -> int: ...


class Resumable(Protocol):
    """What a checkpoint is of; what of `model` requires a gradient is trained."""

    steps_done: int
    skipped: SkippedUpdates

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def settings(self) -> CheckpointPolicy: ...


def identity(model: nn.Module, settings: TrainerSettings, **more: Any) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes from it: parameters, settings, frozen weights.

    Call it before the model is sharded. Of a frozen parameter some values are hashed: enough to tell two
    models apart without reading all of either.
    """
    digest = sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().flatten()
            picked = flat[:: max(1, len(flat) // _SAMPLED)].float().cpu()
            digest.update(name.encode() + picked.numpy().tobytes())
    values = settings.model_dump(mode="json", exclude=_NOT_COMPARED)
    if settings.lr_scheduler == "constant":
        del values["max_steps"]
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return {"trainer": values, "frozen_weights": digest.hexdigest(), "trained_weights": trained, **more}


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step in `folder`; only complete ones have a name that is found."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def latest_name(folder: Path) -> str | None:
    """The name of that checkpoint, as ranks tell it each other."""
    newest = latest(folder)
    return newest.name if newest else None


def save(learner: Resumable, folder: Path, state: Mapping[str, Any], who: Mapping[str, Any]) -> Path:
    """Write `folder`/step-NNNNNN and remove all but the newest `keep_checkpoints`. Every rank calls it.

    Args:
        learner: what is saved.
        folder: holds the checkpoints of the run.
        state: JSON that comes back from `load`.
        who: see `identity`.

    Raises:
        TrainerError: it could not be written; earlier checkpoints are as they were.
    """
    model, optimizer = _model_tensors(learner), optimizer_tensors(learner.optimizer, _trained(learner))
    gathered = enumerate(learner.ranks.gather(_rng()))
    rng = {f"{rank}/{name}": value for rank, states in gathered for name, value in states.items()}
    target = folder / f"step-{learner.steps_done:06d}"
    if learner.ranks.first:
        document = {"format": FORMAT, "step": learner.steps_done, "identity": who, "state": state}
        document["skipped"] = asdict(learner.skipped)
        new = folder / f".new-{target.name}"
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            save_file(model, new / MODEL_FILE)
            save_file(optimizer, new / OPTIMIZER_FILE)
            save_file(rng, new / RNG_FILE)
            (new / STATE_FILE).write_bytes(dump_json(document, indent=1))
            _publish(new, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(new, ignore_errors=True)
            kept = latest(folder)
            raise TrainerError(
                f"checkpoint {target.name} could not be written: {error}",
                where=str(folder),
                remedy=f"make room on the disk; the newest complete checkpoint is {kept.name if kept else 'none'}",
            ) from error
        for old in _checkpoints(folder)[: -learner.settings.keep_checkpoints]:
            shutil.rmtree(old)
    return target


def load(learner: Resumable, path: Path, who: Mapping[str, Any]) -> dict[str, Any]:
    """Bring `learner` to where it was, and return the `state` that was saved with it. Every rank calls it.

    Raises:
        DataError: the checkpoint is damaged, or of another model, other settings or another format.
    """
    try:
        document = json.loads((path / STATE_FILE).read_text())
        model, optimizer, rng = (load_file(path / name) for name in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE))
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"the checkpoint cannot be read: {error}",
            where=str(path),
            remedy="delete this folder: the one before it is used then",
        ) from error
    if not isinstance(document, dict) or not {"format", "step", "identity", "state"} <= document.keys():
        raise DataError("this is not a training state", where=str(path / STATE_FILE), remedy="delete this folder")
    if document["format"] != FORMAT:
        raise DataError(f"checkpoint format {document['format']}, this version reads {FORMAT}", where=str(path))
    differing = _differences(document["identity"], json.loads(json.dumps(who)))
    if differing:
        raise DataError(
            f"the checkpoint is of another model or other settings: {'; '.join(differing[:8])}",
            where=str(path),
            remedy="resume with the settings that it was made with, or start in an empty folder",
        )
    trained = _trained(learner)
    model = checked_weights(model, trained, path / MODEL_FILE)
    slots = checked_state(optimizer, learner.optimizer, trained, path / OPTIMIZER_FILE)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(like(model[name], parameter))
    restore_state(learner.optimizer, trained, slots)
    _restore_rng({k.partition("/")[2]: v for k, v in rng.items() if k.startswith(f"{learner.ranks.rank}/")})
    learner.steps_done = int(document["step"])
    learner.skipped = SkippedUpdates(**document.get("skipped", {}))
    state: dict[str, Any] = document["state"]
    return state


def _trained(learner: Resumable) -> dict[str, nn.Parameter]:
    return {name: p for name, p in learner.model.named_parameters() if p.requires_grad}


def _model_tensors(learner: Resumable) -> dict[str, Tensor]:
    return {name: whole(parameter).contiguous() for name, parameter in _trained(learner).items()}


def _rng() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(states: Mapping[str, Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _publish(new: Path, target: Path) -> None:
    """Rename `new`, once all of it is on the disk."""
    sync_tree(new)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)
    sync(target.parent)


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _differences(saved: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [text for key in keys for text in _differences(saved.get(key), now.get(key), f"{name}.{key}")]
    return [] if saved == now else [f"{name.lstrip('.')} was {saved!r}, is {now!r}"]
