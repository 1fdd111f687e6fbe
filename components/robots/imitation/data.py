"""What an update trains on: samples of the mixture, augmented, encoded and put into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter
from torch.utils.data import DataLoader, Dataset

from armature.components.robots.datasets.mixture import FilePrefetch, Mixture, RobotSample
from armature.components.robots.imitation.settings import ImageAugmentationSettings, PackingSettings, VLATrainerSettings
from armature.components.robots.policies.molmoact2.configuration import SEMANTICS, MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.flow import FlowSamples
from armature.components.robots.policies.molmoact2.processing.batch import Example, PadSide, PolicyBatch, collate, pack
from armature.components.robots.policies.molmoact2.processing.processor import Processor
from armature.components.robots.policies.settings import RobotPolicySettings

# What goes through a model at once.


@dataclass(frozen=True)
class PolicyMicroBatch:
    """A part of an update. `draws` is None where no flow is trained; `tokens` are without padding."""

    batch: PolicyBatch
    draws: FlowSamples | None
    tokens: int

    def to(self, device: torch.device) -> PolicyMicroBatch:
        draws = None if self.draws is None else self.draws.to(device)
        return replace(self, batch=self.batch.to(device), draws=draws)

    @property
    def padding(self) -> int:
        """Tokens of the batch that are of no example."""
        return self.batch.input_ids.numel() - self.tokens


# Which examples share a row.


def arranged(
    examples: Sequence[Example], packing: PackingSettings | None, pad_side: PadSide, multiple: int, pad_id: int
) -> tuple[PolicyBatch, list[int]]:
    """Examples as a batch, packed or one to a row, and which of them each of the batch's examples is.

    Args:
        pad_side: where rows are not packed.

    Raises:
        DataError: as `collate`.
    """
    if packing is None:
        return collate(examples, pad_side, multiple, pad_id), list(range(len(examples)))
    rows = packed_rows([example.length for example in examples], packing)
    return pack(examples, rows, multiple, pad_id), [index for row in rows for index in row]


def packed_rows(lengths: Sequence[int], settings: PackingSettings) -> list[list[int]]:
    """The examples of each row, by best fit: longest first, each into the fullest row that still has room.

    Args:
        lengths: tokens of each example.

    Returns:
        Every example once; rows and the examples in them ascend. No row is longer than `max_row_tokens`, except for
        one with a single example that is.
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


# Random changes of training images.

Pixels = NDArray[np.uint8]


def augmented(pixels: Pixels, settings: ImageAugmentationSettings, random: np.random.Generator) -> Pixels:
    """`pixels`, uint8 RGB (height, width, 3), cropped, rotated, recolored and blurred at random; same size.

    Corners that a rotation leaves empty are black.
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
    """A crop from anywhere, resized to the whole, then rotated about the middle."""
    width, height = image.size
    kept_width, kept_height = round(width * settings.crop_side), round(height * settings.crop_side)
    left = int(random.integers(width - kept_width + 1))
    top = int(random.integers(height - kept_height + 1))
    degrees = random.uniform(-settings.rotation_degrees, settings.rotation_degrees)
    if (kept_width, kept_height) != (width, height):
        box = (left, top, left + kept_width, top + kept_height)
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return image.rotate(degrees, Image.Resampling.BILINEAR) if degrees else image


def _hue_shifted(image: Image.Image, turn: float) -> Image.Image:
    """Every hue moved by `turn` of the circle, in the 256 steps that 8 bits have."""
    steps = round(turn * 256)
    if not steps:
        return image
    hue, saturation, value = image.convert("HSV").split()
    moved = Image.fromarray(np.asarray(hue) + np.uint8(steps % 256))
    return Image.merge("HSV", (moved, saturation, value)).convert("RGB")


ROW_MULTIPLE = 8
"""Rows are padded to one more than a multiple of this."""
_AUGMENTATION, _DRAWS = 0, 1


@dataclass(frozen=True)
class Encoder:
    """Turns samples into examples and micro-batches. `processors` are by tag, all of one horizon."""

    processors: Mapping[str, Processor]
    config: MolmoAct2Config
    policy: RobotPolicySettings
    settings: VLATrainerSettings

    def example(self, sample: RobotSample) -> Example:
        where = f"dataset {sample.source}, episode {sample.episode}, frame {sample.frame}"
        return self.processors[sample.tag].encode(sample.observation, sample.actions, sample.padding, where)

    def micro_batch(self, examples: Sequence[Example], seeds: Sequence[int]) -> PolicyMicroBatch:
        """`seeds` are one per example: of its flow times and noise, whatever batch and row it comes to."""
        pad, side = next(iter(self.processors.values())).vocabulary.pad, SEMANTICS[self.policy.semantics].pad_side
        batch, order = arranged(examples, self.settings.packing, side, ROW_MULTIPLE, pad)
        draws = None
        if batch.actions is not None and self.policy.action_mode != "discrete":
            horizon = batch.actions.shape[1]
            chosen = [seeds[index] for index in order]
            draws = FlowSamples.per_example(chosen, self.policy.num_flow_timesteps, horizon, self.config)
        return PolicyMicroBatch(batch, draws, sum(example.length for example in examples))


class UpdateDataset(Dataset[list[PolicyMicroBatch]]):
    """Item k = 1, 2, ...: the micro-batches of one rank in update k. All ranks have as many.

    The update has the positions (k - 1) * batch_size to k * batch_size - 1 of the mixture's order; what is random
    about one of them depends on the seed and the position alone.
    """

    def __init__(self, mixture: Mixture, encoder: Encoder, rank: int, size: int) -> None:
        self.mixture, self.encoder, self.rank, self.size = mixture, encoder, rank, size

    def positions(self, update: int) -> range:
        """This rank's."""
        count = self.encoder.settings.batch_size
        return range((update - 1) * count + self.rank, update * count, self.size)

    def __getitem__(self, update: int) -> list[PolicyMicroBatch]:
        positions, width = self.positions(update), self.encoder.settings.micro_batch_size
        return [self._micro_batch(positions[start : start + width]) for start in range(0, len(positions), width)]

    def _micro_batch(self, positions: Sequence[int]) -> PolicyMicroBatch:
        seed = self.encoder.settings.seed
        examples = [self.encoder.example(self._sample(position)) for position in positions]
        return self.encoder.micro_batch(examples, [draw_seed(seed, position) for position in positions])

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
    """Of the flow times and the noise of the example at `position`."""
    state = np.random.SeedSequence((seed, _DRAWS, position)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def load(updates: UpdateDataset, first: int, last: int, workers: int) -> Iterator[list[PolicyMicroBatch]]:
    """Updates `first` to `last` in order, each built by one of `workers` processes; 0: in this one, when asked for."""
    options: dict[str, Any] = {}
    if workers:
        # One server process imports what workers need; they are forked from it, before it has any thread.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        options = {"multiprocessing_context": context, "prefetch_factor": 2}
    order = range(first, last + 1)
    loader = DataLoader(updates, batch_size=None, sampler=order, num_workers=workers, collate_fn=_same, **options)
    with FilePrefetch(updates.mixture, updates.positions(last).stop) as files:
        batches = iter(loader)
        for update in order:
            files.reach(updates.positions(update))
            yield next(batches)


def _same(micro_batches: list[PolicyMicroBatch]) -> list[PolicyMicroBatch]:
    return micro_batches
