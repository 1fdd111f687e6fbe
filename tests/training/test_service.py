"""The trainer service: real processes, killed and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from components.batches.table import write_batch
from components.contracts.errors import ConfigurationError, DataError, TrainerError
from components.contracts.machine import Machine
from components.training.client import TrainerClient
from components.training.service_settings import PolicySettings

from .conftest import Tiny, model_settings, trainer_settings

Start = Callable[..., TrainerClient]


@pytest.fixture
def start(tiny: Tiny, tmp_path: Path) -> Start:
    def make(name: str, processes: int = 1, workers: int = 0, **changes: object) -> TrainerClient:
        policy = PolicySettings(
            model_path=tiny.folder,
            model=model_settings(),
            trainer=trainer_settings(**changes),
            temperature=1.0,
            images=tiny.images.root,
        )
        machine = Machine(
            trainer_processes=processes, threads=1, loader_workers=workers, ready_timeout=120, train_timeout=120
        )
        return TrainerClient(policy, machine, tmp_path / name)

    return make


@pytest.fixture
def batches(tiny: Tiny, tmp_path: Path) -> list[Path]:
    """Folders of the batches of steps 1 to 4."""
    folders = []
    for step in range(1, 5):
        folder = tmp_path / f"batch-{step}"
        folder.mkdir()
        write_batch(folder, tiny.samples(8, seed=step))
        folders.append(folder)
    return folders


def weights(trainer: TrainerClient, folder: Path, version: int) -> dict[str, bytes]:
    trainer.publish(folder, version)
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_never_stopped(start: Start, batches: list[Path], tmp_path: Path) -> None:
    with start("straight", workers=1) as trainer:
        straight = [trainer.step(k, batch) for k, batch in enumerate(batches, 1)]
        expected = weights(trainer, tmp_path / "a", 4)
    with start("killed") as trainer:
        assert trainer.resume() == 0
        for k in (1, 2):
            trainer.step(k, batches[k - 1])
        trainer.save()
        trainer.step(3, batches[2])
        assert trainer._program is not None
        for process in trainer._program.family():
            if "components.training.service" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"died|not running"):
            trainer.step(4, batches[3])
        assert not trainer.alive
        trainer.restart()
        assert trainer.resume() == 2
        assert trainer.step(2, batches[1])["loss"] == straight[1]["loss"]  # recorded, not applied again
        resumed = [trainer.step(k, batches[k - 1]) for k in (3, 4)]
        assert weights(trainer, tmp_path / "b", 4) == expected
    for before, after in zip(straight[2:], resumed, strict=True):
        assert before["loss"] == after["loss"]
        assert before["grad_norm"] == after["grad_norm"]


@pytest.mark.slow
def test_a_step_is_applied_once_and_in_order(start: Start, batches: list[Path], tmp_path: Path) -> None:
    with start("once") as trainer:
        first = trainer.step(1, batches[0])
        before = weights(trainer, tmp_path / "000001", 1)
        assert trainer.step(1, batches[0]) == first
        assert weights(trainer, tmp_path / "000001", 1) == before
        with pytest.raises(ConfigurationError, match="another batch"):
            trainer.step(1, batches[1])
        with pytest.raises(ConfigurationError, match="1 steps are applied"):
            trainer.step(3, batches[2])
        with pytest.raises(DataError):
            trainer.step(2, tmp_path / "nowhere")
        scores = trainer.score(batches[0])
        assert all(np.isfinite(score).all() for score in scores)
        with pytest.raises(ConfigurationError, match="version 7"):
            trainer.publish(tmp_path / "000007", 7)
        for version in (2, 3):
            trainer.step(version, batches[version - 1])
            trainer.publish(tmp_path / f"{version:06d}", version)
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdecimal()) == ["000002", "000003"]
        assert trainer.alive


@pytest.mark.slow
def test_an_error_in_a_rank_reaches_the_client(start: Start, tiny: Tiny, tmp_path: Path) -> None:
    samples = tiny.samples(4, seed=9)
    (tmp_path / "nan").mkdir()
    gone = next(sample for sample in samples if sample.images)
    missing = replace(gone.images[0], sha256="0" * 64)
    write_batch(tmp_path, [replace(s, images=(missing,)) if s is gone else s for s in samples])
    gone.behavior_logprobs[:] = np.nan
    write_batch(tmp_path / "nan", samples)
    with start("failing", processes=2) as trainer:
        with pytest.raises(DataError, match="not finite"):
            trainer.step(1, tmp_path / "nan")
        assert trainer.alive
        with pytest.raises((DataError, TrainerError), match="not in the image store"):
            trainer.step(1, tmp_path)
        assert not trainer.alive


@pytest.mark.slow
def test_two_ranks_make_the_update_of_one(start: Start, batches: list[Path], tmp_path: Path) -> None:
    """Sums over ranks are in another order: equal to 1e-5 of the update, in fp32."""
    results = []
    for processes in (1, 2):
        with start(f"ranks-{processes}", processes, adam_epsilon=1e-3) as trainer:
            metrics = [trainer.step(k, batches[k - 1]) for k in (1, 2)]
            scores = trainer.score(batches[2])
            folder = tmp_path / f"weights-{processes}"
            trainer.publish(folder, 2)
            results.append((metrics, scores, load_file(folder / "model.safetensors")))
    (one, scores_one, weights_one), (two, scores_two, weights_two) = results
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "importance_ratio", "entropy", "mismatch_kl", "masked_fraction", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
    for score_one, score_two in zip(scores_one, scores_two, strict=True):
        np.testing.assert_allclose(score_one, score_two, atol=1e-5)
    for name, value in weights_one.items():
        np.testing.assert_allclose(value.numpy(), weights_two[name].numpy(), atol=1e-6)
