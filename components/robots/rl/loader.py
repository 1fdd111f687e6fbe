"""Loading of training samples: images from the store and encoded observations as tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from armature.components.robots.policies.inputs import ModelProcessor, in_threads
from armature.components.robots.policies.model import denoising_steps
from armature.components.robots.policies.settings import InferenceMode
from armature.components.robots.rl.table import ActionChunkSample, Floats

# --- A batch of action chunks ---


class DrawnSteps(NamedTuple):
    """Sampled denoising steps: points before and after each step, (E, T, D) float32, and step numbers, (E,) int64."""

    before: Tensor
    after: Tensor
    step: Tensor


class FlowLossInputs(NamedTuple):
    """Inputs of the flow-matching losses: noises (E, F, T, D) and chunks (E, T, D), float32."""

    noise: Tensor
    actions: Tensor


class CarriedActions(NamedTuple):
    """Executed actions (E, T, D) float32, normalized. The last executed action is repeated up to the horizon T."""

    actions: Tensor


@dataclass(frozen=True)
class ActionChunkBatch:
    """E chunks with N counted numbers: those that the policy sampled and that reached the robot.

    batch: the observations, a `ModelBatch`; for action tokens followed by the tokens.
    order: index of each chunk in the list of samples, (E,) int64.
    drawn: inputs of the flow-matching likelihood or loss; None for action tokens.
    counted: for continuous actions, the executed numbers of the robot's dimensions, (E, T, D) bool; for action tokens,
        the sampled tokens in the batch, (B, L) bool.
    logprobs: the sampler's log-probs of the counted numbers in order, (N,) float64.
    advantages: (E,) float32.
    values, value_targets: values during the rollout and values to learn, (E,) float32; None without a value head.
    """

    batch: Any
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
        """For each number of an action that counts in the loss, the index of its chunk in the batch, (N,) int64."""
        return self.counted.nonzero()[:, 0] if self.drawn is not None else self.batch.example_ids[self.counted]


KEPT_BYTES = 4 * 2**30
"""Default size in bytes of the cache of encoded chunks. About 100,000 chunks fit if images have 84 pixels per side, and
5,000 with 378 pixels per side, as in the released policies."""
Load = Callable[[Sequence[ActionChunkSample]], ActionChunkBatch]


@dataclass(frozen=True)
class ActionChunkLoader:
    """Turns samples into a batch of tensors.

    mode: kind of the actions.
    packing: how the chunks of a forward pass are packed; None: one chunk per row.
    flow_samples: number of flow-matching losses per chunk (FPO); None: one denoising step was sampled instead.
    imitated: the executed actions are the training target, and what was sampled is ignored.
    kept_bytes: size of the cache of encoded chunks, which saves decoding and encoding them again.
    """

    processor: ModelProcessor
    images: ImageStore
    mode: InferenceMode = "continuous"
    packing: PackingSettings | None = None
    flow_samples: int | None = None
    imitated: bool = False
    kept_bytes: int = KEPT_BYTES

    def __call__(self, samples: Sequence[ActionChunkSample]) -> ActionChunkBatch:
        """Return the samples as a batch; packing may change their order, see `ActionChunkBatch.order`.

        Raises:
            DataError: an image is not in the store, or the policy cannot read the observation.
        """
        examples = in_threads(self._kept, samples)
        batch, order = arranged(examples, self.packing, partial(self.processor.batch, multiple=1))
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
        """Check that all samples can be trained on.

        Args:
            where: the batch that the samples come from, for the error message.

        Raises:
            DataError: a sample does not fit this policy, has a number that is not finite, or has an image that is
                missing from the store or was changed there.
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
            elif len(each.tokens) and not self._has_tokens(each.tokens):
                problem = "the policy does not have its tokens"
            elif lost := self._lost_image(each, sound):
                problem = lost
            else:
                continue
            raise DataError(
                f"the answer cannot be trained on: {problem}",
                code="answer_not_trainable",
                where=f"{where}, row {row}, {each.episode_id}, chunk {each.chunk}",
                remedy="the file was changed after the run wrote it: `armature verify` lists changed artifacts. Delete "
                "this folder to build the batch again from its rollouts; delete the rollouts to play them again",
            )

    def _lost_image(self, sample: ActionChunkSample, sound: set[ImageRef]) -> str | None:
        """Return the error message of an image of `sample` that cannot be read; None if all images can be read.

        Images in `sound` are not read again. Images that could be read are added to it.
        """
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
        return denoising_steps(self.processor.settings, self.processor.config)

    def _sizes(self, sample: ActionChunkSample) -> tuple[int, int, int]:
        """Return the number of values that `before`, `after` and `logprobs` of the sample must have."""
        if self.mode == "discrete":
            return 0, 0, max(1, len(sample.tokens))
        points = self.processor.horizon * self.processor.config.max_action_dim
        return points * (self.flow_samples or 1), points, sample.executed * self.processor.action_dimensions

    def _has_tokens(self, tokens: NDArray[np.int32]) -> bool:
        vocabulary = self.processor.config.text_config.vocab_size if self.mode == "discrete" else 0
        return bool(0 <= tokens.min() <= tokens.max() < vocabulary)

    @cached_property
    def _kept(self) -> Callable[[ActionChunkSample], Any]:
        return cached(LRUCache(self.kept_bytes, _bytes), _observed, Lock())(self._example)

    def _example(self, sample: ActionChunkSample) -> Any:
        """Return the sample as an example: its encoded observation, followed by the action tokens if there are any."""
        seen = self.processor.encode(self._observation(sample), where=sample.episode_id)
        if not len(sample.tokens):
            return seen
        tokens = sample.tokens.astype(np.int64)
        return replace(
            seen,
            input_ids=np.concatenate([seen.input_ids, tokens]),
            image_tokens=np.concatenate([seen.image_tokens, np.zeros(len(tokens), bool)]),
        )

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
        """Return the executed actions, normalized and padded to `shape` = (T, max_action_dim)."""
        dimensions = self.processor.action_dimensions
        carried = sample.actions.reshape(sample.executed, dimensions)
        whole = np.pad(carried, ((0, shape[0] - sample.executed), (0, 0)), mode="edge")
        normalized = self.processor.action.normalize(whole, f"{sample.episode_id}, chunk {sample.chunk}")
        return np.pad(normalized, ((0, 0), (0, shape[1] - dimensions)))

    def _counted(self, samples: Sequence[ActionChunkSample]) -> Tensor:
        """Return a mask of the action numbers that were executed by the robot, (E, T, D).

        Actions that were not executed and dimensions that the robot does not have are False.
        """
        counted = np.zeros((len(samples), self.processor.horizon, self.processor.config.max_action_dim), bool)
        for row, each in enumerate(samples):
            counted[row, : each.executed, : self.processor.action_dimensions] = True
        return torch.from_numpy(counted)

    def _observation(self, one: ActionChunkSample) -> RobotObservation:
        images = {name: np.asarray(self.images.open(ref)) for name, ref in zip(one.cameras, one.images, strict=True)}
        return RobotObservation(images, one.state, one.language)


def loaded_ahead(load: Load, parts: Sequence[Sequence[ActionChunkSample]]) -> Generator[ActionChunkBatch]:
    """Yield `load(part)` for each part, in order. A thread loads the next part while the caller uses this one.

    An error of `load` is raised when its part would be yielded. Close the generator if you stop before its end.

    Example:
        >>> list(loaded_ahead(len, [[], []]))
        [0, 0]
    """
    with ThreadPoolExecutor(1, "answers") as thread:
        coming = deque[Future[ActionChunkBatch]]()
        for part in parts:
            coming.append(thread.submit(load, part))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _answered(batch: Any, samples: Sequence[ActionChunkSample]) -> Tensor:
    """Return a mask of the action tokens in the batch, (B, L). They are the last tokens of each example."""
    seen = batch.example_ids >= 0
    lengths = torch.bincount(batch.example_ids[seen])
    first = lengths - torch.tensor([len(each.tokens) for each in samples])
    return seen & (batch.position_ids >= first[batch.example_ids])


def _observed(sample: ActionChunkSample) -> Hashable:
    """Return the cache key of a sample: everything that its encoding depends on."""
    seen = tuple(zip(sample.cameras, sample.images, strict=True))
    return seen, sample.state.tobytes(), sample.language, sample.tokens.tobytes()


def _bytes(example: Any) -> int:
    return sum(value.nbytes for value in vars(example).values() if value is not None)


def _column(values: Sequence[float | None]) -> Tensor | None:
    """Return the values as a tensor (E,) float32, or None if a value is None."""
    present = [value for value in values if value is not None]
    return torch.tensor(present, dtype=torch.float32) if len(present) == len(values) else None


def _numbers(sample: ActionChunkSample) -> list[ArrayLike]:
    """Return all numbers and arrays of a sample that training uses, to check that they are finite."""
    values = [value for value in (sample.value, sample.value_target) if value is not None]
    drawn: list[ArrayLike] = [sample.before, sample.after, sample.logprobs]
    return [sample.state, sample.actions, *drawn, sample.advantage, *values]
