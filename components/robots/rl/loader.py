"""Samples as tensors: images from the store, observations through the policy's processor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from cachetools import LRUCache, cached
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.imitation.data import arranged
from armature.components.robots.imitation.settings import PackingSettings
from armature.components.robots.policies.molmoact2.policy import InferenceMode
from armature.components.robots.policies.molmoact2.processing.batch import Example, PolicyBatch
from armature.components.robots.policies.molmoact2.processing.processor import Processor, in_threads
from armature.components.robots.policies.molmoact2.sampling import InferencePlan
from armature.components.robots.rl.table import ActionChunkSample, Floats

# Answers as tensors.


class DrawnSteps(NamedTuple):
    """The drawn denoising steps: points before and after, (E, T, D) float32, and their numbers, (E,) int64."""

    before: Tensor
    after: Tensor
    step: Tensor


class FlowLossInputs(NamedTuple):
    """Answers with the noise of their flow-matching losses: (E, F, T, D) and (E, T, D) float32."""

    noise: Tensor
    actions: Tensor


class CarriedActions(NamedTuple):
    """Answers as they were carried out, (E, T, D) float32, normalized; after what was carried out, its last action."""

    actions: Tensor


@dataclass(frozen=True)
class ActionChunkBatch:
    """E answers, of which N numbers count: those that a policy has drawn and that reached the robot.

    batch: the observations, followed by the answer where it is action tokens. drawn: of flow matching; None: tokens.
    counted: (E, T, D) bool of the answer's numbers, those of actions that were carried out and of the robot's
    dimensions; or (B, L) bool of the batch's tokens, those of answers. logprobs: (N,) float64, the sampler's of what is
    counted, in order. advantages: (E,) float32. values, value_targets: (E,) float32, of the rollouts and what they are
    to become; None without a value head. order: (E,) int64, which of the samples each answer is.
    """

    batch: PolicyBatch
    order: Tensor
    drawn: DrawnSteps | FlowLossInputs | CarriedActions | None
    counted: Tensor
    logprobs: Tensor
    advantages: Tensor
    values: Tensor | None
    value_targets: Tensor | None

    def to(self, device: torch.device) -> ActionChunkBatch:
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device) for name, value in vars(self).items() if name != "drawn"
        }
        drawn = None if self.drawn is None else type(self.drawn)(*(each.to(device) for each in self.drawn))
        return ActionChunkBatch(**moved, drawn=drawn)

    @property
    def rows(self) -> Tensor:
        """(N,) int64: which answer a counted number belongs to."""
        return self.counted.nonzero()[:, 0] if self.drawn is not None else self.batch.example_ids[self.counted]


KEPT_BYTES = 4 * 2**30
"""Of encoded answers: some 100,000 with images of 84 pixels, 5,000 with the 378 of the released policies."""
Load = Callable[[Sequence[ActionChunkSample]], ActionChunkBatch]


@dataclass(frozen=True)
class ActionChunkLoader:
    """Turns answers into tensors.

    mode: of the actions that answers give. packing: of the answers of a forward pass; None: one to a row.
    flow_samples: losses of each answer; None: one denoising step of it was drawn instead. imitated: the actions that
    were carried out are what is learned, whatever was drawn. kept_bytes: of encoded answers that stay in memory, the
    last ones: they are neither decoded nor encoded again."""

    processor: Processor
    images: ImageStore
    mode: InferenceMode = "continuous"
    packing: PackingSettings | None = None
    flow_samples: int | None = None
    imitated: bool = False
    kept_bytes: int = KEPT_BYTES

    def __call__(self, samples: Sequence[ActionChunkSample]) -> ActionChunkBatch:
        """
        Raises:
            DataError: an image is not in the store, or the policy cannot read the observation.
        """
        examples = in_threads(self._kept, samples)
        batch, order = arranged(examples, self.packing, "left", 1, self.processor.vocabulary.pad)
        samples, discrete = [samples[number] for number in order], self.mode == "discrete"
        return ActionChunkBatch(
            batch=batch,
            order=torch.tensor(order),
            drawn=None if discrete else self._drawn(samples),
            counted=_answered(batch, samples) if discrete else self._counted(samples),
            logprobs=torch.from_numpy(np.concatenate([each.logprobs for each in samples])),
            advantages=torch.tensor([each.advantage for each in samples], dtype=torch.float32),
            values=_column([each.value for each in samples]),
            value_targets=_column([each.value_target for each in samples]),
        )

    def refuse(self, samples: Sequence[ActionChunkSample], where: str) -> None:
        """
        Raises:
            DataError: a sample is not one of this policy, or has a number that is not finite, or an image that is not
                in the store or has changed there.
        """
        sound: set[ImageRef] = set()
        for row, each in enumerate(samples):
            sizes, expected = (len(each.before), len(each.after), len(each.logprobs)), self._sizes(each)
            if sizes != expected and not self.imitated:
                problem = f"its points and log-probs have the sizes {sizes}, the policy's {expected}"
            elif not 0 < each.executed <= self.processor.horizon:
                problem = f"{each.executed} of {self.processor.horizon} actions were carried out"
            elif self.imitated and len(each.actions) != each.executed * self.processor.action_dimensions:
                problem = f"{each.executed} actions of the robot are not {len(each.actions)} numbers"
            elif self._step_drawn and each.flow_step not in range(self._steps):
                problem = f"its drawn step is {each.flow_step}, the policy has 0 to {self._steps - 1}"
            elif len(each.cameras) != len(each.images):
                problem = f"it has {len(each.images)} images of {len(each.cameras)} cameras"
            elif not all(np.isfinite(v).all() for v in _numbers(each)):
                problem = "a number is not finite"
            elif not _within(each.tokens, self.processor.config.text_config.vocab_size):
                problem = "the policy does not have its tokens"
            elif lost := self._lost_image(each, sound):
                problem = lost
            else:
                continue
            raise DataError(
                f"the answer cannot be trained on: {problem}",
                code="answer_not_trainable",
                where=f"{where}, row {row}, {each.episode_id}, chunk {each.chunk}",
                remedy="it is not what the run wrote: `armature verify` names artifacts that changed. Without this "
                "folder the batch is made again from its rollouts; without theirs they are played again",
            )

    def _lost_image(self, sample: ActionChunkSample, sound: set[ImageRef]) -> str | None:
        """Args: sound: images that have been read; those of `sample` are added."""
        try:
            for ref in {*sample.images} - sound:
                self.images.read(ref)
                sound.add(ref)
        except DataError as error:
            return error.what
        return None

    @property
    def _step_drawn(self) -> bool:
        return self.mode == "continuous" and self.flow_samples is None and not self.imitated

    @property
    def _steps(self) -> int:
        return InferencePlan.of(self.processor.settings, self.processor.config).steps

    def _sizes(self, sample: ActionChunkSample) -> tuple[int, int, int]:
        """Of points and log-probs, as they are to be."""
        if self.mode == "discrete":
            return 0, 0, max(1, len(sample.tokens))
        points = self.processor.horizon * self.processor.config.max_action_dim
        return points * (self.flow_samples or 1), points, sample.executed * self.processor.action_dimensions

    @cached_property
    def _kept(self) -> Callable[[ActionChunkSample], Example]:
        return cached(LRUCache(self.kept_bytes, _bytes), _observed, Lock())(self._example)

    def _example(self, sample: ActionChunkSample) -> Example:
        """The observation, and the answer after it where it is tokens."""
        seen = self.processor.encode(self._observation(sample), where=sample.episode_id)
        said = sample.tokens.astype(np.int64)
        ids, images = (
            np.concatenate([seen.input_ids, said]),
            np.concatenate([seen.image_tokens, np.zeros(len(said), bool)]),
        )
        return replace(seen, input_ids=ids, image_tokens=images)

    def _drawn(self, samples: Sequence[ActionChunkSample]) -> DrawnSteps | FlowLossInputs | CarriedActions:
        shape = self.processor.horizon, self.processor.config.max_action_dim
        if self.imitated:
            return CarriedActions(torch.from_numpy(np.stack([self._normalized(each, shape) for each in samples])))
        before = torch.from_numpy(np.stack([each.before for each in samples])).unflatten(1, (-1, *shape))
        after = torch.from_numpy(np.stack([each.after for each in samples])).unflatten(1, shape)
        if self.flow_samples is not None:
            return FlowLossInputs(before, after)
        return DrawnSteps(before[:, 0], after, torch.tensor([each.flow_step for each in samples]))

    def _normalized(self, sample: ActionChunkSample, shape: tuple[int, int]) -> Floats:
        """(T, max_action_dim)."""
        own = self.processor.action_dimensions
        carried = sample.actions.reshape(sample.executed, own)
        whole = np.pad(carried, ((0, shape[0] - sample.executed), (0, 0)), mode="edge")
        normalized = self.processor.action.normalize(whole, f"{sample.episode_id}, chunk {sample.chunk}")
        return np.pad(normalized, ((0, 0), (0, shape[1] - own)))

    def _counted(self, samples: Sequence[ActionChunkSample]) -> Tensor:
        """(E, T, D) bool."""
        counted = np.zeros((len(samples), self.processor.horizon, self.processor.config.max_action_dim), bool)
        for row, each in enumerate(samples):
            counted[row, : each.executed, : self.processor.action_dimensions] = True
        return torch.from_numpy(counted)

    def _observation(self, one: ActionChunkSample) -> RobotObservation:
        images = {name: np.asarray(self.images.open(ref)) for name, ref in zip(one.cameras, one.images, strict=True)}
        return RobotObservation(images, one.state, one.language)


def loaded_ahead(load: Load, parts: Sequence[Sequence[ActionChunkSample]]) -> Generator[ActionChunkBatch]:
    """What `load` makes of each part, in order: that of the next one is made in a thread meanwhile, and of no other.

    Close it where not all are taken. Raises what `load` does, in its part's turn.
    """
    with ThreadPoolExecutor(1, "answers") as thread:
        coming = deque[Future[ActionChunkBatch]]()
        for part in parts:
            coming.append(thread.submit(load, part))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _answered(batch: PolicyBatch, samples: Sequence[ActionChunkSample]) -> Tensor:
    """(B, L) bool: the last tokens of each example."""
    seen = batch.example_ids >= 0
    lengths = torch.bincount(batch.example_ids[seen])
    first = lengths - torch.tensor([len(each.tokens) for each in samples])
    return seen & (batch.position_ids >= first[batch.example_ids])


def _observed(sample: ActionChunkSample) -> Hashable:
    """All that its example is made of."""
    seen = tuple(zip(sample.cameras, sample.images, strict=True))
    return seen, sample.state.tobytes(), sample.language, sample.tokens.tobytes()


def _bytes(example: Example) -> int:
    return sum(value.nbytes for value in vars(example).values() if value is not None)


def _within(tokens: NDArray[np.int32], vocabulary: int) -> bool:
    return not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocabulary


def _column(values: Sequence[float | None]) -> Tensor | None:
    """(E,) float32; None where one is unknown."""
    known = [value for value in values if value is not None]
    return torch.tensor(known, dtype=torch.float32) if len(known) == len(values) else None


def _numbers(sample: ActionChunkSample) -> list[ArrayLike]:
    """All that training computes with."""
    known = [value for value in (sample.value, sample.value_target) if value is not None]
    drawn: list[ArrayLike] = [sample.before, sample.after, sample.logprobs]
    return [sample.state, sample.actions, *drawn, sample.advantage, *known]
