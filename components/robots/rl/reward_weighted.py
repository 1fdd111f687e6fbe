"""Reward-weighted regression: imitation of the policy's own answers, each as much as its episode earned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256

from torch import Tensor

from armature.components.robots.policies.molmoact2.modeling.flow import FlowSamples, flow_errors, noisy_actions
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.sampling import InferencePlan
from armature.components.robots.rl.chunk_learner import ANSWERS, PADDING, SLOTS, ActionChunkLearner, Update
from armature.components.robots.rl.loader import ActionChunkBatch, CarriedActions, Load
from armature.components.robots.rl.settings import RewardWeighted, RobotRLTrainerSettings
from armature.components.robots.rl.table import ActionChunkSample
from armature.components.training.engine import AppliedUpdate
from armature.components.training.ranks import Ranks


class RewardWeightedLearner(ActionChunkLearner):
    """An update minimizes the mean of w_i e_i / W over its answers: w is the advantage that the batch has, W the mean
    advantage of the step's answers, e the flow-matching error of what was carried out, at times and noises that are
    drawn for each answer and update.

    Args:
        plan: what the model sees.
        flow_timesteps: times and noises of an answer in an update.
    """

    def __init__(
        self,
        model: MolmoAct2,
        settings: RobotRLTrainerSettings,
        plan: InferencePlan,
        flow_timesteps: int,
        load: Load,
        ranks: Ranks | None = None,
        shard: Callable[[MolmoAct2], None] | None = None,
    ) -> None:
        self._plan, self._flow_timesteps = plan, flow_timesteps
        super().__init__(model, settings, load, ranks, shard)

    def _losses(
        self, samples: Sequence[ActionChunkSample], part: ActionChunkBatch, update: Update
    ) -> tuple[Tensor, dict[str, float]]:
        assert isinstance(part.drawn, CarriedActions)
        (actions,), plan, config = part.drawn, self._plan, self.model.config
        used = ~part.batch.dimension_padding if plan.mask_dimensions else None
        seeds = [draw_seed(self.settings.seed, update, samples[index]) for index in part.order.tolist()]
        draws = FlowSamples.per_example(seeds, self._flow_timesteps, actions.shape[1], config).to(actions.device)
        points, target = noisy_actions(actions, draws, used)
        both_ways, hides = plan.bidirectional_images, plan.hides_answers
        velocity, _ = self.model.velocities(part.batch, points, draws.times, both_ways, hides)[0]
        errors = flow_errors(velocity, target, part.counted.any(-1), used)
        loss = (part.advantages * errors).sum() / (update.mean_advantage * len(update.samples))
        padding = (part.batch.example_ids < 0).sum()
        counts = {ANSWERS: len(errors), SLOTS: part.batch.example_ids.numel()}
        return loss, counts | {"loss": float(loss.detach()), PADDING: float(padding)}

    def _apply(self, update: Update) -> AppliedUpdate:
        """The schedule of the run, also between its steps, times the rise at the beginning of each step."""
        objective, done = self.settings.objective, update.index + 1
        assert isinstance(objective, RewardWeighted)
        rise = min(1.0, done / max(objective.warmup_updates, 1))
        return self.update(update.step, update.step - 1 + done / update.count, rise)


def draw_seed(seed: int, update: Update, sample: ActionChunkSample) -> int:
    """Of the times and noises of an answer in an update, whatever batch and rank it comes to."""
    key = (seed, update.step, update.index, sample.episode_id, sample.chunk)
    return int.from_bytes(sha256(json.dumps(key).encode()).digest()[:8], "big") >> 1
