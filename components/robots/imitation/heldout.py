"""What a policy does on frames of episodes that it is never trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from armature.components.robots.datasets.mixture import Mixture, RobotSample
from armature.components.robots.imitation.data import Encoder, draw_seed
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import whole_expert
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.policy import InferenceMode, MolmoAct2Policy
from armature.components.robots.policies.molmoact2.processing.norm_stats import RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings

ACTION_ERROR, MEAN_ACTION_ERROR = "heldout/action_error", "heldout/mean_action_error"


def evenly_spread(mixture: Mixture, frames: int) -> list[RobotSample]:
    """`frames` of the mixture's, or all if it has no more."""
    chosen = np.unique(np.linspace(0, mixture.frames - 1, frames).round().astype(int))
    return [mixture.sample(mixture.nth(int(number))) for number in chosen]


@dataclass(frozen=True)
class HeldoutEvaluator:
    """Samples to measure on. `robots` and `settings` are by tag; `robots` have the datasets' own statistics."""

    samples: Sequence[RobotSample]
    encoder: Encoder
    robots: Mapping[str, RobotMetadata]
    settings: Mapping[str, RobotPolicySettings]

    def measure(self, learner: PolicyLearner) -> dict[str, float]:
        """Losses with the same times and noise every time, and the errors of predicted actions. Every rank calls it."""
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

    def _action_errors(self, model: MolmoAct2) -> dict[str, float]:
        """Mean |predicted - demonstrated| over the steps that a robot carries out, in standard deviations.

        Frames past an episode's end do not count, nor do dimensions that never change. Beside it stands the error of
        always answering with the dataset's mean action.
        """
        model.eval()
        predicted, constant = [], []
        for tag, robot in self.robots.items():
            own = [sample for sample in self.samples if sample.tag == tag]
            if not own:
                continue
            mean, spread = (np.array(getattr(robot.action_stats, name), np.float64) for name in ("mean", "std"))
            moving = spread > 0
            answers = self._answers(model, tag, own)
            for sample, answer in zip(own, answers, strict=True):
                there = ~sample.padding[: len(answer)]
                actions = sample.actions[: len(answer)][there][:, moving]
                predicted.append(np.abs(answer[there][:, moving] - actions) / spread[moving])
                constant.append(np.abs(mean[moving] - actions) / spread[moving])
        return {
            ACTION_ERROR: float(np.concatenate(predicted).mean()),
            MEAN_ACTION_ERROR: float(np.concatenate(constant).mean()),
        }

    def _answers(self, model: MolmoAct2, tag: str, samples: Sequence[RobotSample]) -> np.ndarray:
        settings = self.settings[tag]
        mode: InferenceMode = "discrete" if settings.action_mode == "discrete" else "continuous"
        processor = self.encoder.processors[tag]
        on_cpu = next(model.parameters()).device.type == "cpu"  # where one row at a time needs no padding
        rows = 1 if on_cpu else self.encoder.settings.micro_batch_size
        policy = MolmoAct2Policy(model, processor, settings, mode, rows)
        return policy.predict([sample.observation for sample in samples], range(len(samples)))
