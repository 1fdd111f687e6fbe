"""Log-probs of action chunks under the current policy, for continuous actions and for action tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from armature.components.robots.policies.flow import (
    FlowSamples,
    loss_logprobs,
    midpoints,
    noise_scales,
    noisy_actions,
    step_divergences,
    step_logprobs,
)
from armature.components.robots.policies.model import PolicyModel, SamplingPlan
from armature.components.robots.policies.sampling import token_logprobs
from armature.components.robots.rl.loader import ActionChunkBatch, DrawnSteps, FlowLossInputs
from armature.components.robots.rl.settings import RobotRolloutSettings


class Prediction(NamedTuple):
    """Model outputs that log-probs are computed from, with their gradient.

    values: for continuous actions the velocities, (E, T, D), or (E, F, T, D) with FPO; for action tokens the logits,
        (N, V).
    states: inputs of the value head. They come from the action expert, (E, T, hidden), or for action tokens from the
        VLM, (E, 1, hidden).
    """

    values: Tensor
    states: Tensor


class ActionLikelihood(Protocol):
    """Computes log-probs of action chunks, in the way they were sampled.

    Example:
        >>> def chunk_logprobs(likelihood: ActionLikelihood, model: PolicyModel, part: ActionChunkBatch) -> Tensor:
        ...     (prediction,) = likelihood.predict(model, part)
        ...     return likelihood.logprobs(prediction, part)
    """

    @property
    def of_tokens(self) -> bool:
        """True if actions are tokens. The value head then reads hidden states of the VLM instead of the action
        expert's."""

    def predict(self, model: PolicyModel, part: ActionChunkBatch, others: Sequence[nn.Module] = ()) -> list[Prediction]:
        """Return the prediction of the model, followed by one prediction for each action expert in `others`.

        For the latter, the model's action expert is replaced by the other one.
        """

    def logprobs(self, prediction: Prediction, part: ActionChunkBatch) -> Tensor:
        """Return log-probs of the counted numbers or tokens, (N,) float64."""

    def divergences(self, prediction: Prediction, other: Prediction, part: ActionChunkBatch) -> Tensor:
        """Return KL(policy || other policy) for each counted number or token, (N,) float64.

        `prediction` comes from the policy, `other` from the other policy.
        """


@dataclass(frozen=True)
class FlowLikelihood:
    """Likelihood of chunks that were sampled with one random Flow-SDE step. noise_level: η of that step."""

    plan: SamplingPlan
    noise_level: float
    of_tokens = False

    @cached_property
    def _sigmas(self) -> Tensor:
        return noise_scales(self.plan.steps, self.noise_level)

    def predict(self, model: PolicyModel, part: ActionChunkBatch, others: Sequence[nn.Module] = ()) -> list[Prediction]:
        assert isinstance(part.drawn, DrawnSteps)
        times = part.drawn.step.double() / self.plan.steps  # as in sampling, where a family may use all digits
        points = part.drawn.before[:, None]
        outputs = model.velocities(part.batch, points, times[:, None], self.plan, others)
        return [Prediction(velocity[:, 0], states[:, 0]) for velocity, states in outputs]

    def logprobs(self, prediction: Prediction, part: ActionChunkBatch) -> Tensor:
        assert isinstance(part.drawn, DrawnSteps)
        before, after, step = part.drawn
        return step_logprobs(before, after, prediction.values, step, self._sigmas)[part.counted]

    def divergences(self, prediction: Prediction, other: Prediction, part: ActionChunkBatch) -> Tensor:
        assert isinstance(part.drawn, DrawnSteps)
        return step_divergences(prediction.values, other.values, part.drawn.step, self._sigmas)[part.counted]


@dataclass(frozen=True)
class FlowLossLikelihood:
    """Surrogate likelihood of chunks from their flow-matching losses: FPO.

    The likelihood covers everything that was sampled for a chunk, including its initial noise.
    """

    plan: SamplingPlan
    of_tokens = False

    def predict(self, model: PolicyModel, part: ActionChunkBatch, others: Sequence[nn.Module] = ()) -> list[Prediction]:
        assert isinstance(part.drawn, FlowLossInputs) and not others, "settings refuse a KL term"
        noise, actions = part.drawn
        draws = FlowSamples(midpoints(noise.shape[1], noise.device).expand(len(noise), -1), noise)
        points, _ = noisy_actions(actions, draws, self.plan.dimensions(part.batch)[0])
        velocity, states = model.velocities(part.batch, points, draws.times, self.plan)[0]
        return [Prediction(velocity, states[:, 0])]

    def logprobs(self, prediction: Prediction, part: ActionChunkBatch) -> Tensor:
        assert isinstance(part.drawn, FlowLossInputs)
        return loss_logprobs(prediction.values, part.drawn.actions, part.drawn.noise)[part.counted]

    def divergences(self, prediction: Prediction, other: Prediction, part: ActionChunkBatch) -> Tensor:
        raise AssertionError("settings refuse a KL term")


@dataclass(frozen=True)
class TokenLikelihood:
    """Likelihood of action tokens sampled from softmax(logits / temperature). The action expert is not used."""

    plan: SamplingPlan
    temperature: float
    of_tokens = True

    def predict(self, model: PolicyModel, part: ActionChunkBatch, others: Sequence[nn.Module] = ()) -> list[Prediction]:
        assert not others, "action tokens do not use an action expert, so there is nothing to compare"
        return [Prediction(*model.answer_logits(part.batch, part.counted, self.plan))]

    def logprobs(self, prediction: Prediction, part: ActionChunkBatch) -> Tensor:
        return token_logprobs(prediction.values, part.batch.input_ids[part.counted], self.temperature)

    def divergences(self, prediction: Prediction, other: Prediction, part: ActionChunkBatch) -> Tensor:
        raise AssertionError("settings refuse a KL term of action tokens")


def likelihood_of(settings: RobotRolloutSettings, plan: SamplingPlan) -> ActionLikelihood:
    """Return the likelihood that matches how rollouts with `settings` are sampled."""
    if settings.inference_action_mode == "discrete":
        return TokenLikelihood(plan, settings.temperature)
    if settings.likelihood == "fpo":
        return FlowLossLikelihood(plan)
    return FlowLikelihood(plan, settings.noise_level)
