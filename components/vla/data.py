"""What an update trains on: samples of the mixture, augmented, encoded and put into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from armature.components.datasets.mixture import Mixture
from armature.components.datasets.prefetch import FilePrefetch
from armature.components.datasets.samples import RobotSample
from armature.components.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.policies.molmoact2.modeling.flow import FlowSamples
from armature.components.policies.molmoact2.processing.batch import Example
from armature.components.policies.molmoact2.processing.processor import Processor
from armature.components.policies.molmoact2.semantics import SEMANTICS
from armature.components.policies.settings import RobotPolicySettings
from armature.components.vla.augmentation import augmented
from armature.components.vla.micro_batch import PolicyMicroBatch
from armature.components.vla.packing import arranged
from armature.components.vla.settings import VLATrainerSettings

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
