"""The processes of a training, started, brought together and ended as one. Torch-free.

They meet in a folder that only we can write to (torch's FileStore): no port is opened for it, and nothing that a
stranger could send is read. Their collectives listen on one network interface, which is loopback on one node.

As a program it is the parent of one node's ranks: `python -m components.training.processes COUNT FIRST ARGUMENTS...`
starts `python ARGUMENTS...` as ranks FIRST, FIRST + 1, ... and ends as soon as one of them fails. The process guard
ends the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from components.contracts.errors import ConfigurationError
from components.ports import loopback
from components.process import Program

RENDEZVOUS = "ARMATURE_RENDEZVOUS"
"""Variable that names the file in which ranks meet."""
_POLL = 0.1


def start_ranks(
    arguments: Sequence[str | Path],
    processes: int,
    *,
    rendezvous: Path,
    node: int = 0,
    nodes: int = 1,
    interface: str | None = None,
    log: Path | None,
    env: Mapping[str, str | None],
) -> Program:
    """Start `python ARGUMENTS...` as the ranks of one node.

    Args:
        processes: on each node; one rank in all needs nobody to bring it together with others.
        rendezvous: a folder as `private_folder` makes it, new for every start, which all nodes see.
        node: which of the `nodes` this is.
        interface: the network that nodes speak over, or NCCL with servers elsewhere; None on one node: loopback.
        env: more variables of the ranks; those of collectives win over ours.

    Raises:
        ConfigurationError: this machine has no such interface.
    """
    name = _checked(interface) if interface else loopback()
    own = name if nodes > 1 else loopback()
    ours: dict[str, str | None] = {
        "WORLD_SIZE": str(nodes * processes),
        RENDEZVOUS: str(rendezvous / "store"),
        "GLOO_SOCKET_IFNAME": own,
        "NCCL_SOCKET_IFNAME": f"={name}",
    }
    if processes > 1:
        ours["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", __spec__.name, str(processes), str(node * processes), *arguments]
    else:
        ours |= {"RANK": str(node), "LOCAL_RANK": "0"}
        command = [sys.executable, *arguments]
    return Program(command, log=log, env=ours | dict(env))


def private_folder(path: Path) -> Path:
    """`path` as an empty folder of ours alone."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, mode=0o700)
    return path


def _checked(interface: str) -> str:
    known = psutil.net_if_addrs()
    if interface not in known:
        raise ConfigurationError(
            f"this node has no network interface {interface!r}",
            where="machine.trainer_interface",
            remedy=f"every node needs it; choose from {', '.join(sorted(known))}",
        )
    return interface


def _main(processes: int, first: int, arguments: Sequence[str]) -> int:
    """The exit code of the first rank that fails, 0 when all are done."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments], env=os.environ | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
        )
        for local in range(processes)
    ]
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes, first):
            if code:
                print(f"rank {number} ended with exit code {code}", file=sys.stderr)
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
