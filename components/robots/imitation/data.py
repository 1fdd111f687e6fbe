"""Training data of an update: augment samples of the mixture, encode them, and arrange them in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter
from torch.utils.data import DataLoader, Dataset

from armature.components.robots.datasets.mixture import FilePrefetch, Mixture, RobotSample
from armature.components.robots.imitation.settings import ImageAugmentationSettings, PackingSettings, VLATrainerSettings
from armature.components.robots.policies.flow import FlowConfig, FlowSamples
from armature.components.robots.policies.inputs import ModelProcessor
from armature.components.robots.policies.model import ModelBatch
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.training.loading import ErrorCarrier, raise_errors

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class PolicyMicroBatch:
    """Examples of one forward pass.

    draws: noise and times of the flow-matching loss; None if it is not trained.
    tokens: number of tokens without padding.
    """

    batch: ModelBatch
    draws: FlowSamples | None
    tokens: int

    def to(self, device: torch.device) -> PolicyMicroBatch:
        """Return the micro-batch on `device`."""
        draws = None if self.draws is None else self.draws.to(device)
        return replace(self, batch=self.batch.to(device), draws=draws)

    @property
    def padding(self) -> int:
        """Number of padding tokens."""
        return self.batch.input_ids.numel() - self.tokens


# --- Packing ---


def arranged(
    examples: Sequence[Any],
    packing: PackingSettings | None,
    batch: Callable[[Sequence[Any], Sequence[Sequence[int]] | None], Batch],
) -> tuple[Batch, list[int]]:
    """Make a batch of examples, with one example or several packed ones in each row.

    Packing changes the order of the examples. The second result holds, for each example of the batch in order, its
    index in `examples`.

    Args:
        packing: None puts one example into each row.
        batch: Function that makes the batch of the examples and the indices of each row's examples; None: one each.
    """
    if packing is None:
        return batch(examples, None), list(range(len(examples)))
    rows = packed_rows([example.length for example in examples], packing)
    return batch(examples, rows), [index for row in rows for index in row]


def packed_rows(lengths: Sequence[int], settings: PackingSettings) -> list[list[int]]:
    """Assign examples to rows by best fit: the longest example first, each to the fullest row that has room for it.

    Args:
        lengths: Number of tokens of each example.

    Returns:
        Indices of the examples of each row. Each example occurs once; rows and the examples in them are sorted. A row
        is longer than `max_row_tokens` only if it has a single example that is longer.

    Example:
        >>> packed_rows([30, 70, 60, 20], PackingSettings(max_row_tokens=100, max_row_examples=8))
        [[0, 1], [2, 3]]
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda example: (-lengths[example], example)):
        length = lengths[example]
        fitting = [r for r in range(len(rows)) if free[r] >= length and len(rows[r]) < settings.max_row_examples]
        if fitting:
            row = min(fitting, key=lambda r: (free[r], r))
            rows[row].append(example)
            free[row] -= length
        else:
            rows.append([example])
            free.append(settings.max_row_tokens - length)
    return sorted(sorted(row) for row in rows)


# --- Augmentation of images ---

Pixels = NDArray[np.uint8]


def augmented(pixels: Pixels, settings: ImageAugmentationSettings, random: np.random.Generator) -> Pixels:
    """Crop, rotate, recolor and blur an image at random, keeping its size.

    The image is uint8 RGB of shape (height, width, 3). Corners that a rotation leaves empty are black.
    """
    image = _moved(Image.fromarray(pixels), settings, random)
    brightness, contrast, saturation = (
        random.uniform(1 - spread, 1 + spread)
        for spread in (settings.brightness, settings.contrast, settings.saturation)
    )
    turn = random.uniform(-settings.hue, settings.hue)
    changes: list[Callable[[Image.Image], Image.Image]] = [
        lambda one: ImageEnhance.Brightness(one).enhance(brightness),
        lambda one: ImageEnhance.Contrast(one).enhance(contrast),
        lambda one: ImageEnhance.Color(one).enhance(saturation),
        lambda one: _hue_shifted(one, turn),
    ]
    for change in random.permutation(len(changes)):
        image = changes[change](image)
    blurred, radius = random.random() < settings.blur_probability, random.uniform(0.1, 2.0)
    if blurred:
        image = image.filter(ImageFilter.GaussianBlur(radius))
    return np.asarray(image)


def _moved(image: Image.Image, settings: ImageAugmentationSettings, random: np.random.Generator) -> Image.Image:
    """Return a random crop of the image, resized to the image's size and rotated about its center by a random angle."""
    width, height = image.size
    crop_width, crop_height = round(width * settings.crop_side), round(height * settings.crop_side)
    left = int(random.integers(width - crop_width + 1))
    top = int(random.integers(height - crop_height + 1))
    degrees = random.uniform(-settings.rotation_degrees, settings.rotation_degrees)
    if (crop_width, crop_height) != (width, height):
        box = (left, top, left + crop_width, top + crop_height)
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return image.rotate(degrees, Image.Resampling.BILINEAR) if degrees else image


def _hue_shifted(image: Image.Image, turn: float) -> Image.Image:
    """Return the image with all hues shifted by `turn`, a fraction of the full color circle.

    `turn` is rounded to a multiple of 1/256, because hues are stored in 8 bits.
    """
    steps = round(turn * 256)
    if not steps:
        return image
    hue, saturation, value = image.convert("HSV").split()
    moved = Image.fromarray(np.asarray(hue) + np.uint8(steps % 256))
    return Image.merge("HSV", (moved, saturation, value)).convert("RGB")


# --- Samples to micro-batches ---

ROW_MULTIPLE = 8
"""Rows are padded to a length of n * ROW_MULTIPLE + 1 tokens; for the extra token see `collate`."""
_AUGMENTATION, _DRAWS = 0, 1  # keys that give augmentation and flow samples independent random streams


@dataclass(frozen=True)
class Encoder:
    """Encodes samples and puts them into micro-batches.

    processors: the processor of each dataset tag. All processors have the same horizon.
    """

    processors: Mapping[str, ModelProcessor]
    config: FlowConfig
    policy: RobotPolicySettings
    settings: VLATrainerSettings

    def example(self, sample: RobotSample) -> Any:
        """Encode a sample with the processor of the sample's dataset tag."""
        where = f"dataset {sample.source}, episode {sample.episode}, frame {sample.frame}"
        return self.processors[sample.tag].encode(sample.observation, sample.actions, sample.padding, where)

    def micro_batch(
        self, examples: Sequence[Any], seeds: Sequence[int], weights: Sequence[float] | None = None
    ) -> PolicyMicroBatch:
        """Make a micro-batch. The flow times and noise of an example depend only on its seed, not on batch or row.

        Args:
            weights: factors of the examples' losses; None: 1 for each.
        """
        make = next(iter(self.processors.values())).batch
        batch, order = arranged(examples, self.settings.packing, partial(make, multiple=ROW_MULTIPLE))
        if weights is not None:
            batch = replace(batch, weights=torch.tensor([weights[index] for index in order]))
        draws = None
        if batch.actions is not None and self.policy.action_mode != "discrete":
            horizon = batch.actions.shape[1]
            chosen = [seeds[index] for index in order]
            draws = FlowSamples.per_example(chosen, self.policy.num_flow_timesteps, horizon, self.config)
        return PolicyMicroBatch(batch, draws, sum(example.length for example in examples))


class UpdateDataset(Dataset[list[PolicyMicroBatch]]):
    """Item k = 1, 2, ... is the list of one rank's micro-batches in update k; it is equally long on all ranks.

    The update uses the positions (k - 1) * batch_size to k * batch_size - 1 of the mixture's order. Augmentation and
    flow samples depend only on seed and position.
    """

    def __init__(self, mixture: Mixture, encoder: Encoder, rank: int, size: int) -> None:
        self.mixture, self.encoder, self.rank, self.size = mixture, encoder, rank, size

    def positions(self, update: int) -> range:
        """Return the positions of this rank's examples of `update` in the mixture's order.

        The ranks take turns: rank r of n uses every n-th of the update's positions, from number r (counted from 0) on.
        """
        count = self.encoder.settings.batch_size
        return range((update - 1) * count + self.rank, update * count, self.size)

    def __getitem__(self, update: int) -> list[PolicyMicroBatch]:
        positions, width = self.positions(update), self.encoder.settings.micro_batch_size
        return [self._micro_batch(positions[start : start + width]) for start in range(0, len(positions), width)]

    def _micro_batch(self, positions: Sequence[int]) -> PolicyMicroBatch:
        seed = self.encoder.settings.seed
        samples = [self._sample(position) for position in positions]
        weighted = any(source.frame_weights for source in self.mixture.sources)
        return self.encoder.micro_batch(
            [self.encoder.example(sample) for sample in samples],
            [draw_seed(seed, position) for position in positions],
            [sample.weight for sample in samples] if weighted else None,
        )

    def _sample(self, position: int) -> RobotSample:
        sample, settings = self.mixture[position], self.encoder.settings
        if settings.augmentation is None:
            return sample
        random = np.random.default_rng((settings.seed, _AUGMENTATION, position))
        images = {
            name: augmented(image, settings.augmentation, random)
            for name, image in sorted(sample.observation.images.items())
        }
        return replace(sample, observation=replace(sample.observation, images=images))


def draw_seed(seed: int, position: int) -> int:
    """Return the seed of the flow times and noise of the example at `position`."""
    state = np.random.SeedSequence((seed, _DRAWS, position)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def load(updates: UpdateDataset, first: int, last: int, workers: int) -> Iterator[list[PolicyMicroBatch]]:
    """Yield one list of micro-batches for each update from `first` to `last`.

    Each list is built ahead of its use by one of `workers` processes. With 0 workers it is built in this process when
    it is needed.
    """
    options: dict[str, Any] = {}
    if workers:
        # Workers are forked from a server process that has only imported this module: forking this process, which
        # has threads, could deadlock, and spawned workers would each import everything again.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        options = {"multiprocessing_context": context, "prefetch_factor": 2}
    order = range(first, last + 1)
    carried = ErrorCarrier(updates)
    loader = DataLoader(carried, batch_size=None, sampler=order, num_workers=workers, collate_fn=_same, **options)
    with FilePrefetch(updates.mixture, updates.positions(last).stop) as files:
        batches = raise_errors(iter(loader))
        for update in order:
            files.reach(updates.positions(update))
            yield next(batches)


def _same(item: Any) -> Any:
    return item
