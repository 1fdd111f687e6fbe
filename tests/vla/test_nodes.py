"""Training on several nodes, which here are two on the loopback, one gloo rank on each."""

from __future__ import annotations

import shlex
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch

from components.contracts.errors import ConfigurationError, TrainerError
from components.contracts.machine import Machine
from components.contracts.stages import Artifact
from components.process import Program
from components.training.ranks import Ranks
from components.vla import join as joining
from components.vla.follow import carry_out
from components.vla.job import TrainingJob, job_on
from components.vla.nodes import SILENCE, Attempt, NodeHeartbeats, NodeRank, start
from components.vla.settings import TrainVLASettings
from components.vla.train import train
from tests.listeners import beyond_loopback

from .conftest import make_job, policy_settings
from .settings import training_settings
from .test_train import rows_of, weights_of


class OtherNode:
    """Does on being told what a user would, and loses its processes once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.program: Program | None = None
        self.killing = Thread(target=self._kill_once)
        self.open = set[str]()

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.open |= set(beyond_loopback(psutil.Process().children(recursive=True)))

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None:
        self.said.append(text)
        _, found, command = text.partition("armature join ")
        if found:
            words = [sys.executable, "-m", "armature", "join", *shlex.split(command)]
            self.program = Program(words, log=self.folder / "log")
            self.killing.start()

    def _kill_once(self) -> None:
        assert self.program is not None
        while self.program.returncode is None:
            for process in self.program.family():
                with suppress(psutil.NoSuchProcess):
                    if "components.vla.run" in process.cmdline():
                        process.kill()
                        return
            time.sleep(0.05)


@pytest.mark.slow
def test_two_nodes_of_which_one_loses_its_processes_make_the_training_of_one(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    common = {"adam_epsilon": 1e-3, "micro_batch_size": 1}
    one = make_job(inputs, tmp_path / "one", **common | {"micro_batch_size": 4})
    train(one, Ranks())
    two, other = make_job(inputs, tmp_path / "two", interface="lo", shard=True, **common), OtherNode(tmp_path)
    try:
        carry_out(two, other)
        assert other.program is not None
        assert other.program.wait(30) == 0, other.program.tail(60)
    finally:
        if other.program is not None:
            other.program.stop()
            other.killing.join()
    (death,) = [text for text in other.said if "died" in text]
    assert f"node {socket.gethostname()}: exit code " in death and "starting it again" in death
    assert other.open == set()
    for first, second in zip(rows_of(one), rows_of(two), strict=True):
        for key in first.keys() - {"rows", "padding_fraction"}:
            assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), key
    found = weights_of(two)
    for key, value in weights_of(one).items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4, msg=key)


@pytest.fixture
def job(inputs: dict[str, Path], tmp_path: Path) -> TrainingJob:
    made = make_job(inputs, tmp_path, interface="lo")
    made.workspace.mkdir()
    made.file.write_text(made.model_dump_json())
    return made


def test_a_node_that_joins_ends_as_the_training_did(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    Attempt(number=3, result="done").tell(job.workspace)
    joining.join(job.file)
    Attempt(number=3, result="failed").tell(job.workspace)
    monkeypatch.setattr(joining, "PATIENCE", 0.0)
    monkeypatch.setattr(joining, "POLL", 0.01)
    with pytest.raises(TrainerError, match="the training failed"):
        joining.join(job.file)


def test_what_cannot_be_joined_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such job"):
        joining.join(tmp_path / "job.json")
    job.file.write_text(job.model_copy(update={"nodes": 1}).model_dump_json())
    with pytest.raises(ConfigurationError, match="this training has one node"):
        joining.join(job.file)


def test_a_node_too_many_waits_for_a_place(job: TrainingJob) -> None:
    attempt = Attempt(number=1).open(job.workspace)
    assert attempt.folder(job.workspace).stat().st_mode & 0o777 == 0o700
    assert (place := NodeRank.take(job, attempt)) is not None and place.number == 1
    assert NodeRank.take(job, attempt) is None
    again = Attempt(number=2).open(job.workspace)
    assert NodeRank.take(job, again) is not None


def test_a_node_without_a_sign_of_life_is_lost(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("components.vla.nodes.time.monotonic", lambda: now)
    attempt = Attempt(number=1).open(job.workspace)
    signs = NodeHeartbeats(job, attempt)
    now = 1000.0  # nobody has come yet: that is the processes' matter
    assert signs.lost() is None
    place = NodeRank.take(job, attempt)
    assert place is not None and signs.lost() is None
    now += SILENCE - 1
    place.live()
    assert signs.lost() is None
    now += SILENCE + 1
    assert signs.lost() == f"node-1 has given no sign of life for {SILENCE:g} s"


def test_an_interface_that_the_node_lacks_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    attempt = Attempt(number=1).open(job.workspace)
    with pytest.raises(ConfigurationError, match=r"no network interface 'eth99'(?s:.*)lo"):
        start(job.model_copy(update={"interface": "eth99"}), attempt, 0, log=tmp_path / "log")


def test_several_nodes_of_one_gpu_share_one_model(inputs: dict[str, Path], tmp_path: Path) -> None:
    machine = Machine(trainer_nodes=2, trainer_interface="eth1", trainer_gpus=(0,))
    settings = TrainVLASettings(policy=policy_settings(), training=training_settings(batch_size=3))
    job = job_on(machine, settings, inputs, workspace=tmp_path, out=tmp_path / "out", fingerprint="test")
    assert (job.ranks, job.shard) == (2, True)
    with pytest.raises(ConfigurationError, match="batch_size 3 cannot be shared evenly among 2 processes"):
        train(job, Ranks())
