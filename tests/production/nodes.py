"""Nodes of a cluster on one machine: namespaces of network, mounts, processes and host name, with a disk of their own.

The machine's own network is not touched, and nothing is left when the program ends, however it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from armature.components.machine.process import Program

DISK = Path("/srv")
"""Folder at which each node sees its own disk. It is the working folder of the node's programs."""

_START = (
    "mount --bind $0 /srv && mount --bind $1 /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname $2"
    " && ip link set lo up && cd /srv || exit; touch .up; sleep infinity & while :; do wait; done"
)
"""Shell command of a node's first process. It sets the node up, stays, and reaps processes that lose their parent."""


def wait_for(condition: Callable[[], bool], while_running: Program, seconds: float = 300) -> None:
    """Wait until the condition is true. Raise AssertionError if the program ends before, or after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert while_running.returncode is None, f"ended too early:\n{while_running.tail(60)}"
        assert time.monotonic() < end, f"not after {seconds:.0f} s:\n{while_running.tail(60)}"
        time.sleep(0.2)


class Node:
    """A running node. Its disk is `folder` on this machine, which the node sees at `DISK`."""

    def __init__(self, name: str, address: str, folder: Path, hosts: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        for each in ("home", "tmp"):
            (folder / each).mkdir(parents=True)
        namespaces = ("--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
        start = ("unshare", *namespaces, "bash", "-c", _START, folder, hosts, name)
        self._init = Program(start, log=folder / "init.log", grace=0.0)
        wait_for((folder / ".up").exists, self._init)
        (unshare, *_) = self._init.family()
        (self.pid,) = (child.pid for child in unshare.children())

    def kill(self) -> None:
        """Kill all processes of the node at the same moment, as a power cut does. The files on its disk stay."""
        os.kill(self.pid, signal.SIGKILL)
        self._init.wait()

    def stop(self) -> None:
        self._init.stop()

    @property
    def running(self) -> bool:
        return self._init.returncode is None

    def start(self, command: Sequence[str | Path], environment: Mapping[str, str] = {}, log: str = "log") -> Program:
        """Start a program on this node, with only these environment variables and the basic ones. Its output is written
        to `folder / log`."""
        return Program(self._within(command, environment), log=self.folder / log)

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str] = {}, seconds: float = 300) -> str:
        """Run a program on this node to its end, and return its standard output. Raise AssertionError if it fails."""
        done = subprocess.run(
            self._within(command, environment), capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def _within(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> list[str]:
        variables = {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/sbin", "/usr/bin", "/sbin", "/bin")),
            "HOME": str(DISK / "home"),
            "LANG": "C.UTF-8",
            **environment,
        }
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--uts", f"--wdns={DISK}"]
        return [*enter, "env", "-i", *(f"{key}={value}" for key, value in variables.items()), *map(str, command)]


class Network:
    """A network of nodes that are connected to one switch and find each other by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        self._hosts = folder / "hosts"
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._nodes = ExitStack()

    def __enter__(self) -> Self:
        missing = [name for name in ("unshare", "nsenter", "ip", "bash") if shutil.which(name) is None]
        if sys.platform != "linux" or os.geteuid() != 0 or missing:
            raise RuntimeError(f"nodes need Linux, root, and util-linux and iproute2; not here: {missing}")
        self._switch = self._add("switch")
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.close()

    def add(self, name: str, *aliases: str) -> Node:
        """Add a node with an empty disk to the network, and return it. Other nodes find it by its name and `aliases`.

        The interface to the network is called `eth0` on the node.
        """
        node = self._add(name)
        with self._hosts.open("a") as hosts:
            hosts.write(f"{node.address} {' '.join((name, *aliases))}\n")
        self._ip("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
        self._ip("link", "set", "dev", name, "master", "bridge", "up")
        node.run(["ip", "addr", "add", f"{node.address}/24", "dev", "eth0"])
        node.run(["ip", "link", "set", "eth0", "up"])
        return node

    def unplug(self, node: Node) -> None:
        """Disconnect a node from the switch, as if its cable were pulled. Packets from and to the node are lost, and
        senders get no error."""
        self._ip("link", "set", "dev", node.name, "nomaster")

    @contextmanager
    def unplugged(self, node: Node) -> Iterator[None]:
        """Disconnect a node from the switch while the block runs; see `unplug`."""
        self.unplug(node)
        try:
            yield
        finally:
            self._ip("link", "set", "dev", node.name, "master", "bridge")

    def _add(self, name: str) -> Node:
        self._count += 1
        node = Node(name, f"10.77.0.{self._count}", self.folder / f"{self._count}-{name}", self._hosts)
        self._nodes.callback(node.stop)
        return node

    def _ip(self, *words: str) -> None:
        """Run the program `ip` in the network namespace of the switch. It sees the processes of this machine, because
        nodes are given by process id."""
        subprocess.run(["nsenter", f"--target={self._switch.pid}", "--net", "ip", *words], check=True)
