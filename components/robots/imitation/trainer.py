"""Put a training of a robot policy together, and `PolicyTrainer`, which runs one in this process for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from armature.components.contracts.machine import Machine
from armature.components.models.source import locate
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.measure import measure_dataset, overall, plan
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.quantiles import document
from armature.components.robots.datasets.settings import ALONE, QuantileStatsSettings
from armature.components.robots.datasets.source import ACTION, STATE, DatasetSource, split
from armature.components.robots.imitation.data import Encoder, UpdateDataset
from armature.components.robots.imitation.heldout import HeldoutEvaluator, evenly_spread
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import OpenedModel, open_model, prepare
from armature.components.robots.imitation.robots import robots_of
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.policies.family import CheckpointParts, family
from armature.components.robots.policies.model import PolicyModel
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.source import POLICY
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks


@dataclass(frozen=True)
class AssembledTraining:
    """Parts of a training on one rank.

    parts: content of a saved checkpoint besides the weights.
    updates: this rank's micro-batches of each update.
    shapes: shapes of the trained parameters by name.
    evaluator: None if no episodes are held out.
    """

    parts: CheckpointParts
    updates: UpdateDataset
    evaluator: HeldoutEvaluator | None
    opened: OpenedModel[PolicyModel]
    shapes: Mapping[str, list[int]]
    learner: PolicyLearner

    def measure(self) -> dict[str, float]:
        """Return losses and action errors on held-out frames, or {} if no frames are held out.

        If a moving average of the weights is kept, the averaged weights are measured.
        """
        with self.learner.optimizer.averaged():
            return self.evaluator.measure(self.learner) if self.evaluator else {}

    def publish(self, folder: Path) -> None:
        """Write the policy to `folder`; all ranks must call this method.

        If a moving average of the weights is kept, the averaged weights are written.
        """
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
    opened: OpenedModel[PolicyModel] = open_model(start, parts, freeze, processes, ranks)
    # Before the learner may shard the model, so that the shapes are the whole parameters'.
    shapes = {name: list(p.shape) for name, p in opened.model.named_parameters() if p.requires_grad}
    learner = PolicyLearner(opened.model, training, family(policy.family).loss_plan(policy), ranks, opened.shard)
    return AssembledTraining(parts, updates, evaluator, opened, shapes, learner)


class PolicyTrainer:
    """Trains a policy on the demonstrations of a LeRobot dataset, in one process.

    It computes the dataset's statistics, makes or loads the policy, and holds a share of the episodes out to measure
    action errors on. The weights are bitwise equal to the result of the flow `train-vla`. Only the flow can resume, use
    several ranks, and track a run.

    Args:
        dataset: folder of a LeRobot dataset, version 3.0 or 3.1.
        policy: the policy to begin with: sizes of a tiny one, or a checkpoint.
        training: optimizer, batch and held-out settings.
        folder: receives a tiny policy, if `policy` asks for one.

    Raises:
        ConfigurationError: the policy's settings do not fit the dataset.
        DataError: the dataset or the checkpoint is damaged or incomplete.

    Example:
        trainer = PolicyTrainer(Path("my-dataset"), policy, VLATrainerSettings(max_steps=1000), Path("work"))
        errors = trainer.train()
        trainer.save(Path("outputs/policy"))
    """

    def __init__(self, dataset: Path, policy: RobotPolicySettings, training: VLATrainerSettings, folder: Path) -> None:
        self.training = training
        demonstrations = open_dataset(dataset)
        cameras = {name: name for name, feature in demonstrations.info.features.items() if feature.is_visual}
        episodes = tuple(range(len(demonstrations.episodes)))
        source = DatasetSource(demonstrations, ALONE, 1.0, None, STATE, ACTION, cameras, episodes)

        # Exact quantiles of states and actions, by which both are normalized.
        units = plan(demonstrations, QuantileStatsSettings(features=(STATE, ACTION)), source.episodes)
        measured = measure_dataset(demonstrations, units, Machine(), progress=lambda done: None)
        statistics = {ALONE: document(overall(demonstrations, measured, threads=1))}

        if policy.tiny is not None:
            start = family(policy.family).make_tiny_policy(folder / "policy", policy)
        else:
            start = locate(policy.path or policy.checkpoint_path or "", policy.revision, POLICY)
        ranks = Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._training = assemble(start, policy, training, [source], statistics, TrainerProcesses(), ranks)
        self.learner = self._training.learner

    def train(self) -> dict[str, float]:
        """Make all `max_steps` updates and return the metrics of `measure`."""
        for step in (bar := tqdm(range(1, self.training.max_steps + 1), desc="Training")):
            report = self.learner.step(self._training.updates[step])
            bar.set_postfix(loss=f"{report['loss']:.4g}", grad=f"{report['grad_norm']:.3g}")
        return self.measure()

    def measure(self) -> dict[str, float]:
        """Return losses and action errors on the held-out frames, the errors in standard deviations of the actions."""
        return self._training.measure()

    def save(self, folder: Path) -> Path:
        """Write the policy to `folder` in the released layout, which LeRobot and `armature serve-policy` load."""
        self._training.publish(folder)
        return folder
