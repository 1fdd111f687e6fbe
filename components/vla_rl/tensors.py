"""Answers as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armature.components.policies.molmoact2.processing.batch import PolicyBatch


class DrawnSteps(NamedTuple):
    """The drawn denoising steps: points before and after, (E, T, D) float32, and their numbers, (E,) int64."""

    before: Tensor
    after: Tensor
    step: Tensor


class JudgedAnswers(NamedTuple):
    """Answers with the noise of their flow-matching losses: (E, F, T, D) and (E, T, D) float32."""

    noise: Tensor
    actions: Tensor


class CarriedActions(NamedTuple):
    """Answers as they were carried out, (E, T, D) float32, normalized; after what was carried out, its last action."""

    actions: Tensor


@dataclass(frozen=True)
class AnswerBatch:
    """E answers, of which N numbers count: those that a policy has drawn and that reached the robot.

    batch: the observations, followed by the answer where it is action tokens. drawn: of flow matching; None: tokens.
    counted: (E, T, D) bool of the answer's numbers, those of actions that were carried out and of the robot's
    dimensions; or (B, L) bool of the batch's tokens, those of answers. logprobs: (N,) float64, the sampler's of what is
    counted, in order. advantages: (E,) float32. values, value_targets: (E,) float32, of the rollouts and what they are
    to become; None without a value head. order: (E,) int64, which of the samples each answer is.
    """

    batch: PolicyBatch
    order: Tensor
    drawn: DrawnSteps | JudgedAnswers | CarriedActions | None
    counted: Tensor
    logprobs: Tensor
    advantages: Tensor
    values: Tensor | None
    value_targets: Tensor | None

    def to(self, device: torch.device) -> AnswerBatch:
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device) for name, value in vars(self).items() if name != "drawn"
        }
        drawn = None if self.drawn is None else type(self.drawn)(*(each.to(device) for each in self.drawn))
        return AnswerBatch(**moved, drawn=drawn)

    @property
    def rows(self) -> Tensor:
        """(N,) int64: which answer a counted number belongs to."""
        return self.counted.nonzero()[:, 0] if self.drawn is not None else self.batch.example_ids[self.counted]
