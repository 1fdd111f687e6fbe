"""How the processes of a training are started on each of its nodes, and what the first node tells the others.

They speak over the workspace, which all of them see. The first node numbers the attempts and says how the last one
ended; another node says when it lost the attempt that is under way. So an attempt that ends on one ends on all, also
where a process would wait for ever for one that died elsewhere.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from components.contracts.errors import ConfigurationError
from components.process import Program
from components.vla.job import Job


class Attempt(BaseModel):
    """The newest start of the processes; `result` when there will be no other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: PositiveInt
    result: Literal["done", "failed"] | None = None

    @classmethod
    def newest(cls, workspace: Path) -> Attempt | None:
        try:
            return cls.model_validate_json(_file(workspace).read_text())
        except FileNotFoundError:
            return None

    def tell(self, workspace: Path) -> Attempt:
        """Make this the newest."""
        new = workspace / ".attempt.json"
        new.write_text(self.model_dump_json())
        os.replace(new, _file(workspace))  # noqa: PTH105 (says that an old one goes)
        return self

    def lost(self, workspace: Path) -> Path:
        """Is there when a node other than the first could not go on; says which and why."""
        return workspace / f"lost-{self.number}"


def start(job: Job, attempt: Attempt, *, first: bool, log: Path | None) -> Program:
    """This node's processes of `attempt`.

    Raises:
        ConfigurationError: this is another node than the first and does not know the first.
    """
    env: dict[str, str | None] = dict(job.environment)
    if job.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job.gpus))
    if job.threads:
        env["OMP_NUM_THREADS"] = str(job.threads)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={job.processes}", *_meeting(job, attempt, first)]
    if job.ranks == 1:  # needs nobody to bring it together with others, and is there sooner
        launcher, env = [], env | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return Program([sys.executable, *launcher, "-m", "components.vla.run", str(job.file)], log=log, env=env)


def _meeting(job: Job, attempt: Attempt, first: bool) -> list[str]:
    if job.rendezvous is None or job.nodes == 1:
        return ["--standalone"]
    host, _, port = job.rendezvous.partition(":")
    return [
        f"--nnodes={job.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={job.rendezvous}",
        f"--rdzv-id={job.fingerprint}-{attempt.number}",
        f"--rdzv-conf=is_host={int(first)},join_timeout={int(job.ready_timeout)}",
        # By its name, which torchrun would take, a node may not be known to the others.
        f"--local-addr={host if first else _own_address(host, int(port))}",
    ]


def _own_address(host: str, port: int) -> str:
    """The address that this node has towards `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"the first node cannot be reached: {error}",
                where=f"machine.trainer_rendezvous = {host}:{port}",
                remedy="name it as every node knows it, by its address for instance",
            ) from error
        return str(probe.getsockname()[0])


def _file(workspace: Path) -> Path:
    return workspace / "attempt.json"
