"""The trainer service: real processes, killed and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file

from armature.components.artifacts.json_lines import History
from armature.components.contracts.errors import DataError, TrainerError
from armature.components.rollouts.batches.ratios import ratios_file, read_log_ratios
from armature.components.rollouts.batches.table import read_batch, write_batch
from armature.components.training.service_settings import service_settings
from armature.components.vlm.client import TrainerClient
from tests.builders import make_machine
from tests.listeners import beyond_loopback
from tests.refusals import refused
from tests.vlm.conftest import Tiny

Start = Callable[..., TrainerClient]


@pytest.fixture(scope="module")
def start(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Start:
    root = tmp_path_factory.mktemp("services")

    def make(name: str, processes: int = 1, workers: int = 0) -> TrainerClient:
        machine = make_machine(
            trainer__processes=processes, threads=1, loader_workers=workers, ready_timeout=120, train_timeout=120
        )
        return TrainerClient(tiny.policy(adam_epsilon=1e-3), machine, root / name)

    return make


@pytest.fixture(scope="module")
def batches(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of the batches of steps 1 to 6."""
    folders = []
    for step in range(1, 7):
        folder = tmp_path_factory.mktemp("batches") / f"batch-{step}"
        folder.mkdir()
        write_batch(folder, tiny.samples(8, seed=step))
        folders.append(folder)
    return folders


def test_rejects_nccl_to_remote_servers_without_interface(tiny: Tiny, tmp_path: Path) -> None:
    policy = tiny.policy()
    near = make_machine(weight_transfer="nccl", endpoints=("http://127.0.0.1:8000", "http://[::1]:8000"))
    assert service_settings(policy, near, tmp_path).processes.interface is None
    far = make_machine(weight_transfer="nccl", endpoints=("http://10.0.0.9:8000",))
    with refused("network_missing", "10.0.0.9", "machine.trainer.interface"):
        service_settings(policy, far, tmp_path)
    named = make_machine(far, interface="eth1")
    assert service_settings(policy, named, tmp_path).processes.interface == "eth1"


def test_start_times_out_on_incomplete_address(tiny: Tiny, tmp_path: Path) -> None:
    trainer = TrainerClient(tiny.policy(), make_machine(ready_timeout=0.5), tmp_path)

    def begin_to_write() -> None:
        while not (tmp_path / "trainer.json").exists():
            time.sleep(0.01)
        trainer.settings.address.write_text('{"url": "http://127.0')

    with ThreadPoolExecutor(1) as service:
        began = service.submit(begin_to_write)
        with refused("trainer_failed", "0.5", "trainer.log"):
            trainer.start()
        began.result()
    assert not trainer.alive


def weights(trainer: TrainerClient, folder: Path, version: int) -> dict[str, bytes]:
    trainer.publish(folder, version)
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}


@dataclass(frozen=True)
class Trained:
    """A running service, and the results of the steps it has made."""

    trainer: TrainerClient
    metrics: list[dict[str, float]]
    """Metrics of each step, in order."""
    scores: list[npt.NDArray[np.float32]]
    """Log-probs of the samples of batch 3 under the weights after step 2."""
    middle: Path
    """Folder of the weights after step 2."""
    final: dict[str, bytes]
    """The weights after the last step, as bytes by name."""


def train(trainer: TrainerClient, batches: list[Path], folder: Path, steps: int) -> Trained:
    metrics = [trainer.step(k, batches[k - 1], ratios_file(folder, k)) for k in (1, 2)]
    scores = trainer.score(batches[2])
    trainer.publish(folder / "middle", 2)
    metrics += [trainer.step(k, batches[k - 1]) for k in range(3, steps + 1)]
    return Trained(trainer, metrics, scores, folder / "middle", weights(trainer, folder / "final", steps))


@pytest.fixture(scope="module")
def straight(start: Start, batches: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A service of one rank that has made four steps without interruption."""
    with start("straight", workers=1) as trainer:
        yield train(trainer, batches, tmp_path_factory.mktemp("straight"), steps=4)


@pytest.fixture(scope="module")
def two_ranks(start: Start, batches: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A service of two ranks that has made two steps."""
    with start("two-ranks", processes=2) as trainer:
        yield train(trainer, batches, tmp_path_factory.mktemp("two-ranks"), steps=2)


@pytest.mark.slow
def test_resume_after_kill_equals_uninterrupted_run(
    straight: Trained, start: Start, batches: list[Path], tmp_path: Path
) -> None:
    with start("killed") as trainer:
        assert trainer.resume() == 0
        for k in (1, 2):
            trainer.step(k, batches[k - 1])
        trainer.save()
        trainer.settle()
        trainer.step(3, batches[2])
        assert trainer._program is not None
        family = trainer._program.family()
        ranks = [process for process in family if "armature.components.training.service" in " ".join(process.cmdline())]
        for process in ranks:  # listed before the first is killed, because the others may end with it
            os.kill(process.pid, signal.SIGKILL)
        with refused("trainer_failed", "trainer.log"):
            trainer.step(4, batches[3])
        assert not trainer.alive
        trainer.restart()
        assert trainer.resume() == 2
        assert trainer.step(2, batches[1])["loss"] == straight.metrics[1]["loss"]  # recorded, not applied again
        resumed = [trainer.step(k, batches[k - 1]) for k in (3, 4)]
        assert weights(trainer, tmp_path / "b", 4) == straight.final
    for before, after in zip(straight.metrics[2:], resumed, strict=True):
        assert before["loss"] == after["loss"]
        assert before["grad_norm"] == after["grad_norm"]


@pytest.mark.slow
def test_step_is_applied_once_and_in_order(straight: Trained, batches: list[Path], tmp_path: Path) -> None:
    trainer = straight.trainer
    assert weights(trainer, tmp_path / "000004", 4) == straight.final
    assert trainer.step(4, batches[3]) == straight.metrics[3]
    elsewhere = tmp_path / "other" / batches[3].parent.name / batches[3].name
    shutil.copytree(batches[3], elsewhere)
    assert trainer.step(4, elsewhere) == straight.metrics[3]  # the same batch in another machine's store
    assert weights(trainer, tmp_path / "000004", 4) == straight.final
    with refused("batch_mismatch", batches[1]):
        trainer.step(4, batches[1])
    with refused("step_out_of_order", "6", "4"):
        trainer.step(6, batches[5])
    with pytest.raises(DataError):
        trainer.step(5, tmp_path / "nowhere")
    scores = trainer.score(batches[0])
    assert all(np.isfinite(score).all() for score in scores)
    with refused("version_mismatch", "7"):
        trainer.publish(tmp_path / "000007", 7)
    for version in (5, 6):
        trainer.step(version, batches[version - 1])
        trainer.publish(tmp_path / f"{version:06d}", version)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdecimal()) == ["000005", "000006"]
    assert trainer.alive


@pytest.mark.slow
def test_two_ranks_make_same_update_as_one(straight: Trained, two_ranks: Trained, batches: list[Path]) -> None:
    """Two ranks sum gradients in another order, so updates agree to 1e-5 in fp32."""
    for a, b in zip(straight.metrics[:2], two_ranks.metrics, strict=True):
        for name in ("loss", "importance_ratio", "entropy", "mismatch_kl", "masked_fraction", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name
    for step in (1, 2):
        ratios = [read_log_ratios(ratios_file(trained.middle.parent, step)) for trained in (straight, two_ranks)]
        assert list(ratios[0]) == list(ratios[1]) == [sample.sample_id for sample in read_batch(batches[step - 1])]
        for ratios_one, ratios_two in zip(ratios[0].values(), ratios[1].values(), strict=True):
            np.testing.assert_allclose(ratios_one, ratios_two, atol=1e-4)
    for score_one, score_two in zip(straight.scores, two_ranks.scores, strict=True):
        np.testing.assert_allclose(score_one, score_two, atol=1e-5)
    one, two = (load_file(trained.middle / "model.safetensors") for trained in (straight, two_ranks))
    for name, value in one.items():
        np.testing.assert_allclose(value.numpy(), two[name].numpy(), atol=1e-6)


@pytest.mark.slow
def test_ranks_listen_on_loopback_only(straight: Trained, two_ranks: Trained) -> None:
    for trained in (straight, two_ranks):
        assert trained.trainer._program is not None
        family = trained.trainer._program.family()
        assert any(one.status == "LISTEN" for process in family for one in process.net_connections("tcp"))
        assert beyond_loopback(family) == []


@pytest.mark.slow
def test_steps_without_usable_gradient_are_counted_and_resumed(
    straight: Trained, tiny: Tiny, batches: list[Path], tmp_path: Path
) -> None:
    """An update whose gradient overflows is skipped and counted; a batch without a trained token makes no update."""
    samples = tiny.samples(4, seed=9)
    for name in ("overflow", "untrained"):
        (tmp_path / name).mkdir()
    write_batch(tmp_path / "overflow", [replace(s, advantages=np.full_like(s.advantages, 3e38)) for s in samples])
    write_batch(tmp_path / "untrained", [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples])
    trainer = straight.trainer
    done = trainer.resume()  # there is no checkpoint, so nothing changes
    before = weights(trainer, tmp_path / "a", done)
    overflow = trainer.step(done + 1, tmp_path / "overflow")
    assert overflow["updates_skipped"] == 1 and not np.isfinite(overflow["grad_norm"])
    untrained = trainer.step(done + 2, tmp_path / "untrained")
    assert [untrained[name] for name in ("loss", "grad_norm", "updates")] == [0.0] * 3
    assert not untrained.keys() & {"importance_ratio", "entropy"}
    assert weights(trainer, tmp_path / "b", done + 2) == before
    trainer.save()
    trainer.settle()
    trainer.restart()
    assert trainer.resume() == done + 2
    np.testing.assert_equal(trainer.step(done + 1, tmp_path / "overflow"), overflow)
    history = History(tmp_path / "history.jsonl")
    history.append(2, overflow)
    np.testing.assert_equal(history.read(), [{"step": 2, **overflow}])
    assert trainer.step(done + 3, batches[1])["updates_skipped"] == 0


@pytest.mark.slow
def test_rank_error_reaches_client(two_ranks: Trained, tiny: Tiny, tmp_path: Path) -> None:
    samples = tiny.samples(4, seed=9)
    for name in ("poisoned", "gone", "other"):
        (tmp_path / name).mkdir()
    shown = next(row for row, sample in enumerate(samples) if sample.images)
    gone = replace(samples[shown].images[0], sha256="0" * 64)
    changed = {"gone": replace(samples[shown], images=(gone,)), "other": replace(samples[shown], images=())}
    for name, sample in changed.items():
        write_batch(tmp_path / name, [*samples[:shown], sample, *samples[shown + 1 :]])
    samples[shown].input_ids[-1] = -1
    write_batch(tmp_path / "poisoned", samples)
    trainer = two_ranks.trainer
    for name in ("poisoned", "gone"):
        with pytest.raises(DataError) as caught:
            trainer.step(3, tmp_path / name)
        assert f"{name}, row {shown}, sample s{shown}" in caught.value.where
    assert trainer.alive
    with pytest.raises((DataError, TrainerError)):
        trainer.step(3, tmp_path / "other")
    assert not trainer.alive
