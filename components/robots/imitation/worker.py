"""The worker process of a trainer service that trains a policy on demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.datasets.source import open_sources
from armature.components.robots.datasets.stage import read_statistics
from armature.components.robots.imitation.data import PolicyMicroBatch, load
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.imitation.train import PolicyTraining
from armature.components.robots.imitation.trainer import assemble
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import ServiceSettings
from armature.components.training.service_worker import Command, ServiceWorker

REMEMBERED = 1000
"""A checkpoint keeps the metrics of this many of the latest steps; the history file has the metrics of all."""


class PolicyWorker(ServiceWorker):
    """One rank of a trainer service that trains a policy on frames of datasets.

    Raises:
        ConfigurationError, DataError: settings, datasets, statistics and checkpoint do not fit each other.
    """

    def __init__(self, settings: ServiceSettings, ranks: Ranks) -> None:
        training = PolicyTraining.model_validate(settings.training)
        policy, self.trainer = training.settings.policy, training.settings.training
        _refuse(self.trainer, settings.processes.ranks)
        sources = open_sources(training.dataset)
        statistics = read_statistics(training.statistics, sorted({source.tag for source in sources}))
        self._training = assemble(training.policy, policy, self.trainer, sources, statistics, settings.processes, ranks)
        self.learner = self._training.learner
        self._batches: Iterator[list[PolicyMicroBatch]] | None = None
        self._upcoming = 0
        identity = {"fingerprint": training.fingerprint, "trained": self._training.shapes}
        super().__init__(settings, self.learner, identity, self.trainer.keep_checkpoints, REMEMBERED)

    def prepare(self, command: Command) -> None:
        """Do nothing: this worker loads its data itself."""

    def train(self, command: Command, prepared: None) -> dict[str, float]:
        """Make the update `command["step"]` and return its metrics."""
        waiting = perf_counter()
        if self._batches is None or self._upcoming != command["step"]:
            self._upcoming = command["step"]
            workers = self.settings.loader_workers
            self._batches = load(self._training.updates, self._upcoming, self.trainer.max_steps, workers)
        micro_batches, self._upcoming = next(self._batches), self._upcoming + 1
        waited = perf_counter() - waiting
        return self.learner.step(micro_batches) | {"timing/wait_for_data": waited}

    def perform(self, command: Command, prepared: None) -> Any:
        """Carry out the command "measure" or "publish"."""
        match command["name"]:
            case "measure":
                return self._training.measure()
            case "publish":
                self._training.publish(Path(command["folder"]))
                self.ranks.broadcast(None)  # a barrier: no rank replies before the first rank has written the policy
                return None
            case other:
                raise ConfigurationError(f"the trainer has no command {other!r}", code="unknown_command")


def _refuse(trainer: VLATrainerSettings, ranks: int) -> None:
    if trainer.batch_size % ranks:
        raise ConfigurationError(
            f"batch_size {trainer.batch_size} cannot be shared evenly among {ranks} processes",
            code="batch_not_divisible",
            where="training.batch_size, machine.trainer.processes, machine.trainer.nodes",
            remedy=f"make it a multiple of {ranks}",
        )
    if trainer.file_shuffle and trainer.file_shuffle.lanes % ranks:
        raise ConfigurationError(
            f"{trainer.file_shuffle.lanes} lanes cannot be shared evenly among {ranks} processes, so each would read "
            "all files",
            code="lanes_not_divisible",
            where="training.file_shuffle.lanes, machine.trainer.processes, machine.trainer.nodes",
            remedy=f"make it a multiple of {ranks}",
        )
