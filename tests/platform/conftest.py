"""A second machine, from which ports are tried."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from tests.listeners import beyond_loopback

HERE, THERE = "10.213.77.1", "10.213.77.2"
CONNECT = """
import socket, sys

for port in map(int, sys.argv[2:]):
    with socket.socket() as attempt:
        attempt.settimeout(5)
        if attempt.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def second_machine() -> Iterator[str]:
    """The name of a network namespace, which acts as a second machine. There, this machine has the address `HERE`.

    No packet leaves this machine.
    """
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


def reachable(namespace: str, ports: set[int]) -> set[int]:
    """Return those TCP `ports` of this machine to which programs in `namespace` can connect."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-I", "-c", CONNECT, HERE, *map(str, ports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return {int(line) for line in done.stdout.split()}


def assert_closed(namespace: str, processes: list[psutil.Process], programs: set[str]) -> None:
    """Check that the `processes` include the `programs`, and that nothing in `namespace` can connect to their ports."""
    commands = " ".join(word for process in processes for word in process.cmdline())
    assert all(program in commands for program in programs)
    sockets = [one for process in processes for one in process.net_connections("tcp")]
    listening = {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr}
    assert listening and beyond_loopback(processes) == []
    assert reachable(namespace, listening) == set()
