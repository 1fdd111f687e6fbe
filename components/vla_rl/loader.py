"""Samples as tensors: images from the store, observations through the policy's processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from components.artifacts.images import ImageStore
from components.contracts.errors import DataError
from components.contracts.robots import RobotObservation
from components.policies.molmoact2.processing.batch import collate
from components.policies.molmoact2.processing.processor import Processor
from components.vla_rl.learner import AnswerBatch
from components.vla_rl.table import AnswerSample


@dataclass(frozen=True)
class AnswerLoader:
    processor: Processor
    images: ImageStore

    def __call__(self, samples: Sequence[AnswerSample]) -> AnswerBatch:
        """
        Raises:
            DataError: an image is not in the store, or the policy cannot read the observation.
        """
        examples = [self.processor.encode(self._observation(each), where=each.episode_id) for each in samples]
        batch = collate(examples, "left", 1, self.processor.vocabulary.pad)
        shape = (len(samples), self.processor.horizon, self.processor.config.max_action_dim)
        counted = np.zeros(shape, bool)
        for row, each in enumerate(samples):
            counted[row, : each.executed, : self.processor.action_dimensions] = True
        return AnswerBatch(
            batch=batch,
            before=torch.from_numpy(np.stack([each.before for each in samples]).reshape(shape)),
            after=torch.from_numpy(np.stack([each.after for each in samples]).reshape(shape)),
            flow_step=torch.tensor([each.flow_step for each in samples]),
            counted=torch.from_numpy(counted),
            logprobs=torch.from_numpy(np.concatenate([each.logprobs for each in samples])),
            advantages=torch.tensor([each.advantage for each in samples], dtype=torch.float32),
            values=_column([each.value for each in samples]),
            value_targets=_column([each.value_target for each in samples]),
        )

    def refuse(self, samples: Sequence[AnswerSample], where: str) -> None:
        """
        Raises:
            DataError: a sample is not one of this policy, or has a number that is not finite.
        """
        points = self.processor.horizon * self.processor.config.max_action_dim
        for row, each in enumerate(samples):
            counted = each.executed * self.processor.action_dimensions
            sizes = (len(each.before), len(each.after), len(each.logprobs))
            if sizes != (points, points, counted):
                problem = f"its points and log-probs have the sizes {sizes}, the policy's {(points, points, counted)}"
            elif not all(np.isfinite(v).all() for v in _numbers(each)):
                problem = "a number is not finite"
            else:
                continue
            raise DataError(
                f"the answer cannot be trained on: {problem}",
                where=f"{where}, row {row}, {each.episode_id}, chunk {each.chunk}",
                remedy="collect the rollouts again, with the policy that is trained",
            )

    def _observation(self, one: AnswerSample) -> RobotObservation:
        images = {name: np.asarray(self.images.open(ref)) for name, ref in zip(one.cameras, one.images, strict=True)}
        return RobotObservation(images, one.state, one.language)


def _column(values: Sequence[float | None]) -> Tensor | None:
    """(E,) float32; None where one is unknown."""
    known = [value for value in values if value is not None]
    return torch.tensor(known, dtype=torch.float32) if len(known) == len(values) else None


def _numbers(sample: AnswerSample) -> list[ArrayLike]:
    """All that training computes with."""
    known = [value for value in (sample.value, sample.value_target) if value is not None]
    return [sample.before, sample.after, sample.logprobs, sample.advantage, *known]
