"""Evaluate a policy on held-out frames: losses and errors of predicted actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from armature.components.contracts.robots import RobotPolicy
from armature.components.robots.datasets.mixture import Mixture, RobotSample
from armature.components.robots.imitation.data import Encoder, draw_seed
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import whole_expert
from armature.components.robots.policies.family import family
from armature.components.robots.policies.model import PolicyModel
from armature.components.robots.policies.norm_stats import RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings

ACTION_ERROR, MEAN_ACTION_ERROR = "heldout/action_error", "heldout/mean_action_error"


def evenly_spread(mixture: Mixture, frames: int) -> list[RobotSample]:
    """Return `frames` samples spread evenly over the mixture, or all samples if it has fewer."""
    chosen = np.unique(np.linspace(0, mixture.frames - 1, frames).round().astype(int))
    return [mixture.sample(mixture.nth(int(number))) for number in chosen]


@dataclass(frozen=True)
class HeldoutEvaluator:
    """Measures a policy on held-out samples.

    robots: metadata of the robot of each dataset tag, with statistics measured on the datasets.
    settings: the policy's settings for each dataset tag.
    """

    samples: Sequence[RobotSample]
    encoder: Encoder
    robots: Mapping[str, RobotMetadata]
    settings: Mapping[str, RobotPolicySettings]

    def measure(self, learner: PolicyLearner) -> dict[str, float]:
        """Return losses and errors of predicted actions; all ranks must call this method.

        Flow times and noise are the same in each call, so the losses of different steps can be compared.
        """
        report = {f"heldout/{name}": value for name, value in self._losses(learner).items()}
        with whole_expert(learner.model):
            return report | self._action_errors(learner.model)

    def _losses(self, learner: PolicyLearner) -> dict[str, float]:
        width, seed = self.encoder.settings.micro_batch_size, self.encoder.settings.seed
        examples = [self.encoder.example(sample) for sample in self.samples]
        seeds = [draw_seed(seed, number) for number in range(len(examples))]
        parts = range(0, len(examples), width)
        return learner.score(
            [self.encoder.micro_batch(examples[start : start + width], seeds[start : start + width]) for start in parts]
        )

    def _action_errors(self, model: PolicyModel) -> dict[str, float]:
        """Return the mean absolute error of predicted actions, and the error of a constant prediction for comparison.

        The constant prediction is the dataset's mean action. Both errors are in standard deviations of the actions, and
        are means over the steps that the robot executes. Steps after an episode's end and dimensions that never change
        do not count.
        """
        model.eval()
        predicted, constant = [], []
        for tag, robot in self.robots.items():
            samples = [sample for sample in self.samples if sample.tag == tag]
            if not samples:
                continue
            mean, spread = (np.array(getattr(robot.action_stats, name), np.float64) for name in ("mean", "std"))
            moving = spread > 0
            chunks = self._predict(model, tag, samples)
            for sample, chunk in zip(samples, chunks, strict=True):
                valid = ~sample.padding[: len(chunk)]
                actions = sample.actions[: len(chunk)][valid][:, moving]
                # Flat, because robots may differ in their numbers of dimensions.
                predicted.append((np.abs(chunk[valid][:, moving] - actions) / spread[moving]).ravel())
                constant.append((np.abs(mean[moving] - actions) / spread[moving]).ravel())
        return {
            ACTION_ERROR: float(np.concatenate(predicted).mean()),
            MEAN_ACTION_ERROR: float(np.concatenate(constant).mean()),
        }

    def _predict(self, model: PolicyModel, tag: str, samples: Sequence[RobotSample]) -> np.ndarray:
        """Return predicted chunks (N, n_action_steps, action dimensions) for samples of one tag."""
        settings = self.settings[tag]
        mode: Literal["discrete", "continuous"] = "discrete" if settings.action_mode == "discrete" else "continuous"
        processor, rows = self.encoder.processors[tag], self.encoder.settings.micro_batch_size
        policy: RobotPolicy = family(settings.family).player(model, processor, settings, mode, rows)
        return policy.predict([sample.observation for sample in samples], range(len(samples)))
