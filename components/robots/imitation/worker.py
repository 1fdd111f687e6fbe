"""The worker process of a trainer service that trains a policy on demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.source import open_sources, split
from armature.components.robots.datasets.stage import read_statistics
from armature.components.robots.imitation.data import Encoder, PolicyMicroBatch, UpdateDataset, load
from armature.components.robots.imitation.heldout import HeldoutEvaluator, evenly_spread
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import open_model, prepare
from armature.components.robots.imitation.robots import robots_of
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.imitation.train import PolicyTraining
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import ServiceSettings
from armature.components.training.service_worker import Command, ServiceWorker

REMEMBERED = 1000
"""Number of last steps whose metrics a checkpoint keeps; the history file has the metrics of all steps."""


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
        robots = robots_of(training.policy, policy, sources, statistics)
        heldout = self.trainer.heldout
        trained, held_out = split(sources, heldout.fraction if heldout else 0.0, self.trainer.seed)
        self._parts = robots.saved()
        encoder = Encoder(robots.processors(), self._parts.config, policy, self.trainer)
        self._heldout = None
        if heldout and held_out:
            samples = evenly_spread(Mixture(held_out, policy.chunk_size, self.trainer.seed), heldout.frames)
            settings_by_tag = {tag: each.settings for tag, each in robots.parts.items()}
            self._heldout = HeldoutEvaluator(samples, encoder, robots.measured, settings_by_tag)
        self._updates = UpdateDataset(
            Mixture(trained, policy.chunk_size, self.trainer.seed, self.trainer.file_shuffle),
            encoder,
            ranks.rank,
            ranks.size,
        )
        freeze = partial(prepare, settings=self.trainer, semantics=policy.semantics)
        opened = self._opened = open_model(training.policy, self._parts, freeze, settings.processes, ranks)
        shapes = {name: list(p.shape) for name, p in opened.model.named_parameters() if p.requires_grad}
        self.learner = PolicyLearner(opened.model, self.trainer, LossPlan.of(policy), ranks, opened.shard)
        self._batches: Iterator[list[PolicyMicroBatch]] | None = None
        self._upcoming = 0
        identity = {"fingerprint": training.fingerprint, "trained": shapes}
        super().__init__(settings, self.learner, identity, self.trainer.keep_checkpoints, REMEMBERED)

    def prepare(self, command: Command) -> None:
        """Do nothing: this worker loads its data itself."""

    def train(self, command: Command, prepared: None) -> dict[str, float]:
        """Make the update `command["step"]` and return its metrics."""
        waiting = perf_counter()
        if self._batches is None or self._upcoming != command["step"]:
            self._upcoming = command["step"]
            workers = self.settings.loader_workers
            self._batches = load(self._updates, self._upcoming, self.trainer.max_steps, workers)
        micro_batches, self._upcoming = next(self._batches), self._upcoming + 1
        waited = perf_counter() - waiting
        return self.learner.step(micro_batches) | {"timing/wait_for_data": waited}

    def perform(self, command: Command, prepared: None) -> Any:
        """Carry out the command "measure" or "publish"."""
        match command["name"]:
            case "measure":
                with self.learner.optimizer.averaged():
                    return self._heldout.measure(self.learner) if self._heldout else {}
            case "publish":
                return self._publish(Path(command["folder"]))
            case other:
                raise ConfigurationError(f"the trainer has no command {other!r}", code="unknown_command")

    def _publish(self, folder: Path) -> None:
        """Write the policy, with averaged weights if `ema_decay` is set."""
        with self.learner.optimizer.averaged():  # publish must be inside: on a CPU the averages are not copied
            self._opened.publish(folder, self._parts, self.ranks)
        self.ranks.broadcast(None)  # a barrier: no rank replies before the first rank has written the policy


def _refuse(trainer: VLATrainerSettings, ranks: int) -> None:
    if trainer.batch_size % ranks:
        raise ConfigurationError(
            f"batch_size {trainer.batch_size} cannot be shared evenly among {ranks} processes",
            code="batch_not_divisible",
            where="training.batch_size, machine.trainer_processes, machine.trainer_nodes",
            remedy=f"make it a multiple of {ranks}",
        )
    if trainer.file_shuffle and trainer.file_shuffle.lanes % ranks:
        raise ConfigurationError(
            f"{trainer.file_shuffle.lanes} lanes cannot be shared evenly among {ranks} processes, so each would read "
            "all files",
            code="lanes_not_divisible",
            where="training.file_shuffle.lanes, machine.trainer_processes, machine.trainer_nodes",
            remedy=f"make it a multiple of {ranks}",
        )
