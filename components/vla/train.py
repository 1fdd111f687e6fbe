"""The training loop, as every rank runs it."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from components.artifacts.history import History
from components.contracts.errors import ConfigurationError
from components.datasets.mixture import Mixture
from components.datasets.source import open_sources, split
from components.datasets.stage import read_statistics
from components.models.source import CHECKPOINT
from components.policies.molmoact2.checkpoints.checkpoint import load_model, save_policy
from components.policies.molmoact2.checkpoints.parts import PolicyParts
from components.policies.molmoact2.modeling.losses import LossPlan
from components.training import checkpoints
from components.training.ranks import Ranks, whole
from components.vla.data import Encoder, UpdateDataset, load
from components.vla.export import exported
from components.vla.groups import prepare
from components.vla.heldout import HeldoutEvaluator, evenly_spread
from components.vla.job import TrainingJob
from components.vla.learner import PolicyLearner
from components.vla.robots import robots_of
from components.vla.sharding import sharder


def train(job: TrainingJob, ranks: Ranks) -> None:
    """Train to `max_steps`, from the newest checkpoint if there is one, and write `job.out`/checkpoint.

    The history's step 0 is before any training. A step is recorded before it is saved, so the history never lacks one
    that the weights contain.

    Raises:
        ConfigurationError, DataError: settings, datasets, statistics and checkpoint do not fit each other.
    """
    policy, settings = job.settings.policy, job.settings.training
    _refuse(job)
    sources = open_sources(job.dataset)
    statistics = read_statistics(job.statistics, sorted({source.tag for source in sources}))
    robots = robots_of(job.policy, policy, sources, statistics)
    held = settings.heldout
    training, kept = split(sources, held.fraction if held else 0.0, settings.seed)
    mixture = Mixture(training, policy.chunk_size, settings.seed)
    parts = robots.saved()
    encoder = Encoder(robots.processors(), parts.config, policy, settings)
    heldout = None
    if held and kept:
        samples = evenly_spread(Mixture(kept, policy.chunk_size, settings.seed), held.frames)
        own = {tag: each.settings for tag, each in robots.parts.items()}
        heldout = HeldoutEvaluator(samples, encoder, robots.measured, own)

    model = load_model(job.policy, parts)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    prepare(model, settings, policy.semantics)
    who = {"fingerprint": job.fingerprint, "trained": _shapes(model)}
    shard = sharder(ranks, policy.dtype) if job.shard else None
    learner = PolicyLearner(model, settings, LossPlan.of(policy), ranks, shard)
    newest = ranks.broadcast(checkpoints.latest_name(job.checkpoints))
    if newest is not None:
        checkpoints.load(learner, job.checkpoints / newest, who)

    job.workspace.mkdir(parents=True, exist_ok=True)
    history = History(job.history)

    def record(step: int, values: dict[str, float]) -> None:
        if ranks.first:
            history.append(step, values)

    if heldout is not None and newest is None:
        record(0, heldout.measure(learner))
    updates = UpdateDataset(mixture, encoder, ranks.rank, ranks.size)
    waiting = perf_counter()
    for micro_batches in load(updates, learner.steps_done + 1, settings.max_steps, job.loader_workers):
        waited = perf_counter() - waiting
        report = learner.step(micro_batches) | {"timing/wait_for_data": waited}
        step, last = learner.steps_done, learner.steps_done == settings.max_steps
        if held and heldout is not None and (step % held.every == 0 or last):
            with learner.optimizer.averaged():
                report |= heldout.measure(learner)
        record(step, report)
        if step % settings.save_every == 0 or last:
            checkpoints.save(learner, job.checkpoints, {}, who)
        waiting = perf_counter()
    _publish(job, learner, parts, dtypes)


def _publish(job: TrainingJob, learner: PolicyLearner, parts: PolicyParts, dtypes: dict[str, torch.dtype]) -> None:
    """Write the policy, adapters merged, in the dtypes that it was loaded in."""
    with learner.optimizer.averaged():
        weights = exported(learner.model, whole)  # on the CPU not copies, so that they are averages only in here
        if learner.ranks.first:
            save_policy(job.out / CHECKPOINT, parts, {name: value.to(dtypes[name]) for name, value in weights.items()})
    learner.ranks.broadcast(None)  # none ends before it is written: the first rank may be on another node


def _shapes(model: torch.nn.Module) -> dict[str, Any]:
    return {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _refuse(job: TrainingJob) -> None:
    size = job.settings.training.batch_size
    if size % job.ranks:
        raise ConfigurationError(
            f"batch_size {size} cannot be shared evenly among {job.ranks} processes",
            where="training.batch_size, machine.trainer_processes, machine.trainer_nodes",
            remedy=f"make it a multiple of {job.ranks}",
        )
