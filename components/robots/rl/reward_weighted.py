"""Reward-weighted regression: the policy imitates its own action chunks, weighted by the reward of their episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256

from torch import Tensor

from armature.components.robots.policies.flow import FlowSamples, flow_errors, noisy_actions
from armature.components.robots.policies.model import PolicyModel, SamplingPlan
from armature.components.robots.rl.chunk_learner import ANSWERS, PADDING, SLOTS, ActionChunkLearner, Update
from armature.components.robots.rl.loader import ActionChunkBatch, CarriedActions, Load
from armature.components.robots.rl.settings import RewardWeighted, RobotRLTrainerSettings
from armature.components.robots.rl.table import ActionChunkSample
from armature.components.training.engine import AppliedUpdate
from armature.components.training.ranks import Ranks


class RewardWeightedLearner(ActionChunkLearner):
    """Learner of the objective reward_weighted.

    The loss of an update is the mean of w_i e_i / W over its chunks. w_i is the chunk's weight (the batch's advantage
    column), W the mean weight of all chunks of the step, and e_i the flow-matching error of the executed actions at
    times and noises that are sampled again for each chunk and update.

    Args:
        plan: how the model sees an observation, and the dimensions of actions.
        flow_timesteps: number of (time, noise) pairs per chunk and update.
    """

    def __init__(
        self,
        model: PolicyModel,
        settings: RobotRLTrainerSettings,
        plan: SamplingPlan,
        flow_timesteps: int,
        load: Load,
        ranks: Ranks | None = None,
        shard: Callable[[PolicyModel], None] | None = None,
    ) -> None:
        self._plan, self._flow_timesteps = plan, flow_timesteps
        super().__init__(model, settings, load, ranks, shard)

    def _losses(
        self, samples: Sequence[ActionChunkSample], part: ActionChunkBatch, update: Update
    ) -> tuple[Tensor, dict[str, float]]:
        assert isinstance(part.drawn, CarriedActions)
        (actions,), plan, config = part.drawn, self._plan, self.model.config
        noisy, judged = plan.dimensions(part.batch)
        seeds = [draw_seed(self.settings.seed, update, samples[index]) for index in part.order.tolist()]
        draws = FlowSamples.per_example(seeds, self._flow_timesteps, actions.shape[1], config).to(actions.device)
        points, target = noisy_actions(actions, draws, noisy)
        velocity, _ = self.model.velocities(part.batch, points, draws.times, plan)[0]
        errors = flow_errors(velocity, target, part.counted.any(-1), judged)
        loss = (part.advantages * errors).sum() / (update.mean_advantage * len(update.samples))
        padding = part.batch.padding
        counts = {ANSWERS: len(errors), SLOTS: padding.numel()}
        return loss, counts | {"loss": float(loss.detach()), PADDING: float(padding.sum())}

    def _apply(self, update: Update) -> AppliedUpdate:
        """Apply the update. Its learning rate is the value of the run's schedule times the warm-up within the step.

        The schedule advances with each update, not only with each step.
        """
        objective, done = self.settings.objective, update.index + 1
        assert isinstance(objective, RewardWeighted)
        rise = min(1.0, done / max(objective.warmup_updates, 1))
        return self.update(update.step, update.step - 1 + done / update.count, rise)


def draw_seed(seed: int, update: Update, sample: ActionChunkSample) -> int:
    """Return the seed from which an update samples a chunk's flow-matching times and noises.

    It does not depend on the batch that the chunk is in or on the rank.
    """
    key = (seed, update.step, update.index, sample.episode_id, sample.chunk)
    return int.from_bytes(sha256(json.dumps(key).encode()).digest()[:8], "big") >> 1
