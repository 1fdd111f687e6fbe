"""What the processes of a training read."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from components.contracts.machine import Machine
from components.contracts.secrets import Environment
from components.vla.settings import TrainVLASettings


class TrainingJob(BaseModel):
    """A training: its settings and inputs, where its state and its result go, and the machine's facts.

    fingerprint: names the training; its checkpoints are resumed by no other.
    processes: on each node.
    nodes: see the same folders under the same names; with several, `interface` is the network between them.
    gpus: of each node, one per process; empty on CPU.
    shard: split the model over all processes (FSDP2) instead of copying it to each.
    environment: more variables of the processes.
    ready_timeout: seconds that nodes wait for each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: TrainVLASettings
    policy: Path
    dataset: Path
    statistics: Path
    workspace: Path
    out: Path
    fingerprint: str
    processes: PositiveInt
    nodes: PositiveInt
    interface: str | None
    gpus: tuple[int, ...]
    shard: bool
    threads: NonNegativeInt
    loader_workers: NonNegativeInt
    environment: Environment
    ready_timeout: PositiveFloat

    @property
    def ranks(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes

    @property
    def file(self) -> Path:
        """Where every process reads this."""
        return self.workspace / "job.json"

    @property
    def history(self) -> Path:
        return self.workspace / "history.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.workspace / "checkpoints"

    def error(self, rank: int) -> Path:
        """Where a rank writes what ended it."""
        return self.workspace / f"error-{rank}.json"


def job_on(machine: Machine, settings: TrainVLASettings, inputs: dict[str, Path], **places: object) -> TrainingJob:
    """The training on `machine`: several GPUs share one model, several CPU processes have one each."""
    return TrainingJob.model_validate(
        {
            "settings": settings,
            **inputs,
            **places,
            "processes": machine.trainer_processes,
            "nodes": machine.trainer_nodes,
            "interface": machine.trainer_interface,
            "gpus": machine.trainer_gpus,
            "shard": machine.trainer_nodes * machine.trainer_processes > 1 and bool(machine.trainer_gpus),
            "threads": machine.threads,
            "loader_workers": machine.loader_workers,
            "environment": machine.trainer_environment,
            "ready_timeout": machine.ready_timeout,
        }
    )
