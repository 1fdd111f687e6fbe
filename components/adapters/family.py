"""The adapter of every family: what differs between families is in their `FamilySpec`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from components.adapters.base import MultimodalAdapter
from components.adapters.collate import text_batch, token_type_ids
from components.adapters.images import PLACEHOLDER_RUNS, ImageSource, image_features, is_missing, process_one
from components.adapters.joins import Features
from components.adapters.sequences import merge_turns, runs_fit, sample_of, turn_defect
from components.adapters.spec import FamilySpec, known_token_ids, token_id
from components.adapters.validate import validate_batch
from components.artifacts.pixels import to_rgb
from components.contracts.batches import MultimodalBatch, Sample, TurnAdvantages
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.images import ImageRef
from components.contracts.rollouts import GenerateOutputs, Turn

log = logging.getLogger(__name__)


class FamilyAdapter(MultimodalAdapter):
    """Rollouts to batches for one family.

    `images` opens an image by its reference (as `ImageStore.open` does); only rollouts with images need it.
    `max_tokens` bounds a sequence: a turn that would end beyond it is dropped, so a sequence of several turns is
    cut between turns, never inside an image or a completion.
    """

    def __init__(
        self,
        processor: Any,
        spec: FamilySpec,
        images: ImageSource | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(processor)
        self.processor, self.spec, self.images, self.max_tokens = processor, spec, images, max_tokens
        self.image_token_id = token_id(spec.feature_token, processor)
        self.typed_token_ids = frozenset(known_token_ids(spec.typed_tokens, processor) or [self.image_token_id])
        reserved = known_token_ids((processor.image_token, *spec.reserved), processor)
        self.forbidden_token_ids = frozenset({self.image_token_id, *self.typed_token_ids, *reserved})
        pad = self.tokenizer.pad_token_id
        self.pad_token_id = int(pad if pad is not None else self.tokenizer.eos_token_id)
        self._runs_of_size: dict[tuple[int, int], tuple[int, ...]] = {}

    # Rollouts to samples

    def samples(
        self, outputs: GenerateOutputs, advantages: TurnAdvantages | None = None
    ) -> tuple[list[Sample], Counter[str]]:
        """Training sequences in order, and how many turns were dropped, by reason.

        A turn is dropped alone: the other turns of its trajectory stay, and a later turn that extends an earlier
        one across it is still merged, with the dropped completion as context. `advantages` are needed for turns that
        are kept; without them all are zeros.
        """
        samples: list[Sample] = []
        drops: Counter[str] = Counter()
        runs: dict[ImageRef, tuple[int, ...] | str] = {}
        for trajectory in outputs.trajectories:
            good = []
            for turn in trajectory.turns:
                reason = "reward_not_finite" if not np.isfinite(trajectory.reward) else self._defect(turn, runs)
                if reason is None:
                    good.append(turn)
                else:
                    drops[reason] += 1
            merged = merge_turns(good, self.spec.merge_turns)
            samples += [sample_of(trajectory, turns, advantages) for turns in merged]
        return samples, drops

    def _defect(self, turn: Turn, runs: dict[ImageRef, tuple[int, ...] | str]) -> str | None:
        reason = turn_defect(turn, self.forbidden_token_ids, self.max_tokens)
        if reason is not None:
            return reason
        needed: list[int] = []
        for ref in turn.images:
            if ref not in runs:
                runs[ref] = self._runs(ref)
            found = runs[ref]
            if isinstance(found, str):
                return found
            needed += found
        if not runs_fit(turn.prompt_token_ids, self.image_token_id, needed):
            return "placeholder_mismatch"
        return None

    def _runs(self, ref: ImageRef) -> tuple[int, ...] | str:
        """Runs of feature tokens that the image needs, or why it cannot be used.

        The image is always opened, for it may be damaged; it is processed once per size, which decides the runs.
        """
        try:
            image = self._source()(ref)
        except (DataError, OSError, KeyError) as error:
            log.warning("image %s dropped: %s", ref.sha256[:12], error)
            return "image_missing" if is_missing(error) else "image_unreadable"
        if image.size not in self._runs_of_size:
            try:
                self._runs_of_size[image.size] = tuple(self.process_image(image)[PLACEHOLDER_RUNS].tolist())
            except DataError as error:
                log.warning("image %s dropped: %s", ref.sha256[:12], error)
                return "image_unprocessable"
        return self._runs_of_size[image.size]

    def _source(self) -> ImageSource:
        if self.images is None:
            raise ConfigurationError(
                "the rollouts have images, but the adapter has no image store",
                where=type(self).__name__,
                remedy="pass images=ImageStore(root).open to get_adapter",
            )
        return self.images

    # Images

    def process_image(self, image: Image.Image) -> dict[str, Tensor]:
        """The features of one image, on the CPU: what can be kept per distinct image.

        Raises:
            DataError: the processor refuses the image.
            ConfigurationError: the processor's outputs are not those that the family's entry declares.
        """
        features = process_one(self.processor, to_rgb(image), self.image_token_id)
        found = image_features(features).keys()
        if found != self.spec.joins.keys():
            raise ConfigurationError(
                f"the image processor returns {sorted(found)}, its entry declares {sorted(self.spec.joins)}",
                where=type(self.processor).__name__,
                remedy="declare every output in FamilySpec.joins",
            )
        return features

    def n_image_tokens(self, features: Features) -> int:
        """How many feature tokens the image takes in a sequence."""
        return int(features[PLACEHOLDER_RUNS].sum())

    def join(self, features: Sequence[Features]) -> dict[str, Tensor]:
        """Model inputs of several images, equal to what the processor returns for all of them at once."""
        if not features:
            return {}
        return {name: join([one[name] for one in features], features) for name, join in self.spec.joins.items()}

    # Samples to batches

    def collate(self, samples: Sequence[Sample], images: ImageSource | None = None) -> MultimodalBatch:
        """`collate_features` with each distinct image opened and processed once."""
        source = images if images is not None or not any(one.images for one in samples) else self._source()
        processed: dict[ImageRef, dict[str, Tensor]] = {}

        def features(ref: ImageRef) -> dict[str, Tensor]:
            assert source is not None
            if ref not in processed:
                processed[ref] = self.process_image(source(ref))
            return processed[ref]

        return self.collate_features(samples, features)

    def collate_features(self, samples: Sequence[Sample], features: Callable[[ImageRef], Features]) -> MultimodalBatch:
        """The right-padded batch of `samples`, row by row in order; `features` gives `process_image` of an image.

        Raises:
            DataError: no samples, or a row's placeholders are not those that its images need.
        """
        if not samples:
            raise DataError("a batch needs at least one sample")
        batch = text_batch(samples, self.pad_token_id)
        of_rows = [[features(ref) for ref in sample.images] for sample in samples]
        for sample, of_row in zip(samples, of_rows, strict=True):
            self._check_row(sample, of_row)
        joined = self.join([one for of_row in of_rows for one in of_row])
        batch.pixel_values = joined.pop("pixel_values", None)
        batch.extra_model_kwargs = joined
        if self.spec.type_ids is not None:
            batch.extra_model_kwargs[self.spec.type_ids] = token_type_ids(
                batch.input_ids, batch.attention_mask, self.typed_token_ids
            )
        return batch

    def _check_row(self, sample: Sample, features: Sequence[Features]) -> None:
        runs = [run for one in features for run in one[PLACEHOLDER_RUNS].tolist()]
        if not runs_fit(sample.input_ids, self.image_token_id, runs):
            found = int((sample.input_ids == self.image_token_id).sum())
            raise DataError(
                f"{found} image tokens for {len(features)} images that need {sum(runs)}, in runs of {runs[:8]}",
                where=f"sample {sample.sample_id}",
                remedy="use the processor (and its image size) that the samples were built with",
            )

    def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
        """All samples of `outputs` as one batch; `advantages` is None: the trainer computes them from `rewards`.

        Raises:
            DataError: every turn was dropped.
        """
        samples, drops = self.samples(outputs)
        if drops:
            log.warning("dropped %d turns: %s", drops.total(), dict(drops))
        if not samples:
            raise DataError(
                f"no turn is left to train on; dropped: {dict(drops)}",
                where=f"{len(outputs.trajectories)} trajectories",
                remedy="look at the rollouts: every one has the defect that was counted",
            )
        return validate_batch(replace(self.collate(samples), advantages=None))
