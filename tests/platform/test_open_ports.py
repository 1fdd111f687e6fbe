"""A second machine finds no port of ours open: all TCP ports are scanned from another network namespace."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from components.contracts.machine import Machine
from components.models.tiny import make_tiny_checkpoint
from components.training.client import TrainerClient
from components.training.service_settings import PolicySettings
from tests.listeners import beyond_loopback
from tests.training.conftest import model_settings, trainer_settings

HERE, THERE = "10.213.77.1", "10.213.77.2"
SCAN = """
import asyncio, sys

async def attempt(port, turn):
    async with turn:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(sys.argv[1], port), 5)
        except (OSError, asyncio.TimeoutError):
            return
        print(port)
        writer.close()

async def main():
    turn = asyncio.Semaphore(512)
    await asyncio.gather(*(attempt(port, turn) for port in range(1, 65536)))

asyncio.run(main())
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def second_machine() -> Iterator[str]:
    """A network namespace in which this machine has the address `HERE`; nothing leaves this machine."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, Linux and iproute2")
    name, ours, theirs = f"scan-{os.getpid()}", f"sc{os.getpid()}a", f"sc{os.getpid()}b"
    with ExitStack() as made:
        if (done := ip("netns", "add", name)).returncode != 0:
            pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
        made.callback(ip, "netns", "delete", name)
        if (done := ip("link", "add", ours, "type", "veth", "peer", "name", theirs)).returncode != 0:
            pytest.skip(f"no virtual interface can be made here: {done.stderr.strip()}")
        made.callback(ip, "link", "delete", ours)
        for command in (
            ("link", "set", theirs, "netns", name),
            ("addr", "add", f"{HERE}/30", "dev", ours),
            ("link", "set", ours, "up"),
            ("-n", name, "addr", "add", f"{THERE}/30", "dev", theirs),
            ("-n", name, "link", "set", theirs, "up"),
        ):
            done = ip(*command)
            assert done.returncode == 0, done.stderr
        yield name


def scan(namespace: str) -> set[int]:
    """The TCP ports of this machine that answer there."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-I", "-c", SCAN, HERE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return {int(line) for line in done.stdout.split()}


def ports_of(processes: list[psutil.Process]) -> set[int]:
    sockets = [one for process in processes for one in process.net_connections("tcp")]
    return {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr}


def trainer_of(checkpoint: Path, folder: Path) -> TrainerClient:
    policy = PolicySettings(
        model_path=checkpoint,
        model=model_settings(),
        trainer=trainer_settings(),
        temperature=1.0,
        images=folder / "images",
    )
    machine = Machine(trainer_processes=2, threads=1, loader_workers=0, ready_timeout=300)
    return TrainerClient(policy, machine, folder / "trainer")


def test_the_scan_finds_what_is_open(second_machine: str) -> None:
    """Else nothing found would mean nothing."""
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as loopback:
        ports = [one.getsockname()[1] for one in (everywhere, loopback)]
        found = scan(second_machine)
    assert [port in found for port in ports] == [True, False]


def assert_closed(namespace: str, programs: set[str]) -> None:
    """No child of this process, among them `programs`, can be reached from `namespace`."""
    family = psutil.Process().children(recursive=True)
    commands = " ".join(word for process in family for word in process.cmdline())
    assert all(program in commands for program in programs)
    ours = ports_of(family)
    assert ours and beyond_loopback(family) == []
    assert scan(namespace) & ours == set()


def test_no_port_of_a_trainer_is_open_to_a_second_machine(second_machine: str, tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", 0)
    with trainer_of(checkpoint, tmp_path):
        assert_closed(second_machine, {"components.training.service"})
