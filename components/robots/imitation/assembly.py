"""Put the parts of a training together: data, model, learner and held-out evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.source import DatasetSource, split
from armature.components.robots.imitation.data import Encoder, UpdateDataset
from armature.components.robots.imitation.heldout import HeldoutEvaluator, evenly_spread
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import OpenedModel, open_model, prepare
from armature.components.robots.imitation.robots import robots_of
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.policies.molmoact2.checkpoints.parts import PolicyParts
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks


@dataclass(frozen=True)
class AssembledTraining:
    """Parts of a training on one rank.

    parts: what a saved checkpoint contains besides the weights.
    updates: this rank's micro-batches of each update.
    shapes: shapes of the trained parameters by name.
    evaluator: None if no episodes are held out.
    """

    parts: PolicyParts
    updates: UpdateDataset
    evaluator: HeldoutEvaluator | None
    opened: OpenedModel
    shapes: Mapping[str, list[int]]
    learner: PolicyLearner

    def measure(self) -> dict[str, float]:
        """Return losses and action errors on held-out frames, with averaged weights if there are; {} without frames."""
        with self.learner.optimizer.averaged():
            return self.evaluator.measure(self.learner) if self.evaluator else {}

    def publish(self, folder: Path) -> None:
        """Write the policy to `folder`, with averaged weights if there are; all ranks must call it."""
        with self.learner.optimizer.averaged():  # publish must be inside: on a CPU the averages are not copied
            self.opened.publish(folder, self.parts, self.learner.ranks)


def assemble(
    start: Path,
    policy: RobotPolicySettings,
    training: VLATrainerSettings,
    sources: Sequence[DatasetSource],
    statistics: Mapping[str, Mapping[str, Any]],
    processes: TrainerProcesses,
    ranks: Ranks,
) -> AssembledTraining:
    """Assemble the training of the policy in `start` on datasets.

    Args:
        statistics: Content of LeRobot's stats.json by tag.

    Raises:
        ConfigurationError, DataError: settings, datasets, statistics and checkpoint do not fit each other.
    """
    robots = robots_of(start, policy, sources, statistics)
    heldout, seed = training.heldout, training.seed
    trained, held_out = split(sources, heldout.fraction if heldout else 0.0, seed)
    parts = robots.saved()
    encoder = Encoder(robots.processors(), parts.config, policy, training)
    evaluator = None
    if heldout and held_out:
        samples = evenly_spread(Mixture(held_out, policy.chunk_size, seed), heldout.frames)
        settings_by_tag = {tag: each.settings for tag, each in robots.parts.items()}
        evaluator = HeldoutEvaluator(samples, encoder, robots.measured, settings_by_tag)
    mixture = Mixture(trained, policy.chunk_size, seed, training.file_shuffle)
    updates = UpdateDataset(mixture, encoder, ranks.rank, ranks.size)
    freeze = partial(prepare, settings=training, semantics=policy.semantics)
    opened = open_model(start, parts, freeze, processes, ranks)
    # Before the learner may shard the model, so that the shapes are the whole parameters'.
    shapes = {name: list(p.shape) for name, p in opened.model.named_parameters() if p.requires_grad}
    learner = PolicyLearner(opened.model, training, LossPlan.of(policy), ranks, opened.shard)
    return AssembledTraining(parts, updates, evaluator, opened, shapes, learner)
