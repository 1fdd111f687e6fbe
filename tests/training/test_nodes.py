"""Training on several nodes, which here are two on the loopback, with a copy of the model on the two ranks of each."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
from safetensors.torch import load_file

from armature.components.artifacts.disk import write_file
from armature.components.batches.table import write_batch
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.process import Program
from armature.components.training import join as joining
from armature.components.training import nodes
from armature.components.training.client import run_steps
from armature.components.training.links import NodeLinks, connect, network
from armature.components.training.nodes import Attempt, LostNode, Member, announce, lost_node, start
from armature.components.training.processes import TrainerProcesses
from armature.components.training.service_settings import ServiceSettings, service_settings
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from tests.listeners import beyond_loopback
from tests.refusals import refused
from tests.vlm.conftest import Tiny, model_settings, trainer_settings

STEPS, KILLED_IN = 5, 4
ONE = Machine(threads=1, loader_workers=0, ready_timeout=120, train_timeout=120)
HYBRID = {"trainer_nodes": 2, "trainer_processes": 2, "trainer_interface": "lo", "trainer_sharding": "hybrid"}
TWO = ONE.model_copy(update=HYBRID)


class OtherNode:
    """Does on being told what a user would, and loses its rank once."""

    loses_a_rank = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.program: Program | None = None

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def metrics(self, values: Mapping[str, float], step: int) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None:
        self.said.append(text)
        told = re.search("armature join ([^`\\n]+)", text)
        if told is not None and (self.program is None or self.program.returncode is not None):
            words = [sys.executable, "-m", "armature", "join", str(self.training(Path(shlex.split(told[1])[0])))]
            self.program = Program(words, log=self.folder / "log")

    def training(self, file: Path) -> Path:
        """What it joins, told of `file`."""
        return file

    def kill(self) -> None:
        """Of a rank alone, not of what would notice it at once."""
        assert self.program is not None
        for process in self.program.family():
            with suppress(psutil.NoSuchProcess):
                if process.cmdline()[1:3] == ["-m", "armature.components.training.service"]:
                    process.kill()
                    return


def policy_of(tiny: Tiny) -> TrainerPolicySettings:
    return TrainerPolicySettings(
        model_path=tiny.folder,
        model=model_settings(),
        trainer=trainer_settings(adam_epsilon=1e-3),
        temperature=1.0,
        images=tiny.images.root,
    )


def train(tiny: Tiny, machine: Machine, folder: Path, events: OtherNode) -> dict[str, torch.Tensor]:
    """The weights after STEPS steps of which the first two are in a checkpoint; one loses a rank."""
    batches, killing, opened = [], list[Thread](), set[str]()
    for step in range(1, STEPS + 1):
        batches.append(folder / f"batch-{step}")
        batches[-1].mkdir(parents=True)
        write_batch(batches[-1], tiny.samples(8, seed=step))

    with TrainerClient(policy_of(tiny), machine, folder / "trainer", events) as trainer:

        def one_step(step: int) -> None:
            if step == KILLED_IN and events.loses_a_rank and events.program is not None and not killing:
                opened.update(beyond_loopback(psutil.Process().children(recursive=True)))
                killing.append(Thread(target=lambda: (time.sleep(0.1), events.kill())))
                killing[0].start()
            trainer.step(step, batches[step - 1])
            if step == 2:
                trainer.save()
                trainer.settle()

        run_steps(trainer, STEPS, lambda: None, one_step, folder / "out", events)
    assert opened == set()
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.slow
def test_two_nodes_of_which_one_loses_its_rank_in_mid_step_make_the_training_of_one(tiny: Tiny, tmp_path: Path) -> None:
    expected = train(tiny, ONE, tmp_path / "one", OtherNode(tmp_path))
    other = OtherNode(tmp_path)
    try:
        found = train(tiny, TWO, tmp_path / "two", other)
        assert other.program is not None
        assert other.program.wait(30) == 0, other.program.tail(60)
        assert "Traceback" not in other.program.tail(20)
    finally:
        if other.program is not None:
            other.program.stop()
    (death,) = [text for text in other.said if "died" in text]
    assert "starting it again" in death
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0, msg=name)


class SecondGpu(OtherNode):
    """A node whose one GPU is the second of this machine; it loses nothing."""

    loses_a_rank = False

    def training(self, file: Path) -> Path:
        settings = ServiceSettings.model_validate_json(file.read_text())
        processes = settings.processes.model_copy(update={"gpus": (1,)})
        copy = self.folder / "of-the-second-node.json"
        copy.write_text(settings.model_copy(update={"processes": processes}).model_dump_json())
        return copy


def largest_difference(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((value - two[name]).abs().max()) for name, value in one.items())


@pytest.mark.gpu(2)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_two_nodes_of_one_gpu_make_the_training_of_one(sharding: str, tiny: Tiny, tmp_path: Path) -> None:
    """Without TF32, which is too coarse to tell. One node then resumes from the checkpoint of both."""
    exact = {"trainer_gpus": (0,), "trainer_environment": {"NVIDIA_TF32_OVERRIDE": "0"}}
    one = ONE.model_copy(update=exact)
    two = one.model_copy(update=HYBRID | {"trainer_processes": 1, "trainer_sharding": sharding})
    expected, other = train(tiny, one, tmp_path / "one", OtherNode(tmp_path)), SecondGpu(tmp_path)
    try:
        found = train(tiny, two, tmp_path / "two", other)
        assert other.program is not None
        assert other.program.wait(30) == 0, other.program.tail(60)
    finally:
        if other.program is not None:
            other.program.stop()
    saved = "trainer/checkpoints/step-000002"
    shutil.copytree(tmp_path / "two" / saved, tmp_path / "resumed" / saved)
    last = OtherNode(tmp_path)
    resumed = train(tiny, one, tmp_path / "resumed", last)
    assert "resuming after step 2" in last.said
    off = largest_difference(found, expected), largest_difference(resumed, expected)
    moved = largest_difference(expected, load_file(tiny.folder / "model.safetensors"))
    print(f"{sharding}: {off[0]:.1e} off, resumed by one node {off[1]:.1e}; the training moved weights by {moved:.1e}")
    assert max(off) < 1e-6 < 1e-4 < moved


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def settings(tiny: Tiny, tmp_path: Path) -> ServiceSettings:
    made = service_settings(policy_of(tiny), TWO, tmp_path / "trainer")
    made.workspace.mkdir()
    made.file.write_text(made.model_dump_json())
    return made


def test_a_node_that_joins_ends_as_the_training_did(settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    Attempt(number=3, result="done").tell(settings.workspace)
    joining.join(settings.file)
    Attempt(number=3, result="failed").tell(settings.workspace)
    monkeypatch.setattr(joining, "PATIENCE", 0.0)
    monkeypatch.setattr(joining, "POLL", 0.01)
    with refused("joined_training_failed", settings.workspace):
        joining.join(settings.file)


def test_a_node_that_comes_first_waits_for_the_first(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "POLL", 0.01)
    text = settings.file.read_text()
    settings.file.unlink()
    early = Thread(target=joining.join, args=(settings.file,))
    early.start()
    early.join(0.1)
    assert early.is_alive()
    Attempt(number=1, result="done").tell(settings.workspace)
    write_file(settings.file, text.encode())
    early.join(20)
    assert not early.is_alive()


def test_every_training_that_a_folder_lists_is_joined_until_the_folder_is_removed(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (joining, nodes):
        monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(joining, "PATIENCE", 0.0)
    second = settings.model_copy(update={"workspace": tmp_path / "second"})
    second.workspace.mkdir()
    second.file.write_text(second.model_dump_json())
    for training in (settings, second):
        announce(training, tmp_path / "rendezvous")
    Attempt(number=1, result="done").tell(settings.workspace)
    Attempt(number=1, result="failed").tell(second.workspace)
    with refused("joined_training_failed", second.workspace):
        joining.join(tmp_path / "rendezvous")
    Attempt(number=1, result="done").tell(second.workspace)
    waiting = Thread(target=joining.join, args=(tmp_path / "rendezvous",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    shutil.rmtree(tmp_path / "rendezvous")
    waiting.join(20)
    assert not waiting.is_alive()


def test_what_cannot_be_joined_is_refused(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "FIRST_NODE", 0.0)
    with refused("training_not_found", tmp_path / "trainer.json"):
        joining.join(tmp_path / "trainer.json")
    alone = settings.model_copy(update={"processes": TrainerProcesses.of(ONE)})
    settings.file.write_text(alone.model_dump_json())
    with refused("nothing_to_join", settings.file):
        joining.join(settings.file)


@pytest.fixture
def links(settings: ServiceSettings) -> Iterator[NodeLinks]:
    with NodeLinks("lo", silence=60) as links:
        yield links


def test_a_node_too_many_waits_for_a_place(settings: ServiceSettings, links: NodeLinks) -> None:
    attempt = Attempt.following(settings.workspace, links.address).open(settings.workspace)
    assert attempt.folder(settings.workspace).stat().st_mode & 0o777 == 0o700
    with connect(links.address, 60) as link, connect(links.address, 60) as another:
        assert (member := Member.enter(settings, attempt, link)) is not None and member.number == 1
        assert Member.enter(settings, attempt, another) is None
        again = Attempt.following(settings.workspace, links.address).open(settings.workspace)
        assert Member.enter(settings, again, another) is not None


def test_only_members_of_an_attempt_can_end_it(settings: ServiceSettings, links: NodeLinks) -> None:
    first = Attempt.following(settings.workspace, links.address).open(settings.workspace)
    with connect(links.address, 60) as isolated, connect(links.address, 60) as healthy:
        lost = Member.enter(settings, first, isolated)
        second = Attempt.following(settings.workspace, links.address).open(settings.workspace)
        member = Member.enter(settings, second, healthy)
        assert lost is not None and member is not None
        lost.give_up(settings, first, "exit code 1")
        with connect(links.address, 60):  # a stranger
            assert lost_node(settings, second, links) is None
        isolated.close()
        assert lost_node(settings, second, links) is None
        healthy.close()
        wait_for(lambda: lost_node(settings, second, links) is not None)
        found = lost_node(settings, second, links)
        assert found == LostNode(1, f"node {socket.gethostname()} (127.0.0.1): it ended")


def test_what_a_node_says_that_gives_up_is_heard(settings: ServiceSettings, links: NodeLinks) -> None:
    attempt = Attempt.following(settings.workspace, links.address).open(settings.workspace)
    with connect(links.address, 60) as link:
        member = Member.enter(settings, attempt, link)
        assert member is not None and lost_node(settings, attempt, links) is None
        member.give_up(settings, attempt, "exit code 1")
    found = lost_node(settings, attempt, links)
    assert found == LostNode(1, f"node {socket.gethostname()} (127.0.0.1): exit code 1")


def test_a_node_that_cannot_reach_the_first_says_why(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "POLL", 0.01)
    with NodeLinks("lo", silence=60) as gone:
        address = gone.address
    Attempt.following(settings.workspace, address).open(settings.workspace)
    joined = Thread(target=joining.join, args=(settings.file,))
    joined.start()
    wait_for(lambda: bool(caplog.messages))
    Attempt(number=1, result="done").tell(settings.workspace)
    joined.join(20)
    (message,) = caplog.messages
    assert f"127.0.0.1, port {address[1]}: [Errno 111] Connection refused" in message
    assert "lo (127.0.0.1)" in message and "machine.trainer_interface" in message


def test_an_interface_has_a_name_and_an_address() -> None:
    assert network("lo") == network("127.0.0.1") == ("lo", "127.0.0.1")


def test_an_interface_that_the_node_lacks_is_refused(settings: ServiceSettings, tmp_path: Path) -> None:
    attempt = Attempt(number=1).open(settings.workspace)
    elsewhere = settings.processes.model_copy(update={"interface": "eth99"})
    with refused("unknown_network_interface", "'eth99'", "lo"):
        start(settings.model_copy(update={"processes": elsewhere}), attempt, 0, log=tmp_path / "log")


def test_several_nodes_of_one_gpu_share_one_model() -> None:
    machine = Machine(trainer_nodes=2, trainer_interface="eth1", trainer_gpus=(0,))
    processes = TrainerProcesses.of(machine)
    assert (processes.ranks, processes.sharding) == (2, "full")
