"""The adapter of every family: what differs between families is in the `ImageInputs` of its collator."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import numpy as np
from PIL import Image

from armature.components.adapters.base import MultimodalAdapter
from armature.components.adapters.collate import SampleCollator
from armature.components.adapters.images import PLACEHOLDER_RUNS, ImageSource, is_missing
from armature.components.adapters.sequences import merge_turns, runs_fit, sample_of, turn_defect
from armature.components.adapters.validate import validate_batch
from armature.components.contracts.batches import MultimodalBatch, Sample, TurnAdvantages
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import GenerateOutputs, Turn

log = logging.getLogger(__name__)


class FamilyAdapter(MultimodalAdapter):
    """Rollouts to samples for one family, and to whole batches by its `collator`.

    `images` opens an image by its reference (as `ImageStore.open` does); only rollouts with images need it.
    `max_tokens` bounds a sequence: a turn that would end beyond it is dropped, so a sequence of several turns is
    cut between turns, never inside an image or a completion.
    """

    def __init__(
        self, collator: SampleCollator, images: ImageSource | None = None, max_tokens: int | None = None
    ) -> None:
        super().__init__(collator.processor)
        self.collator, self.images, self.max_tokens = collator, images, max_tokens
        self._runs_of_size: dict[tuple[int, int], tuple[int, ...]] = {}

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
            merged = merge_turns(good, self.collator.spec.merge_turns)
            samples += [sample_of(trajectory, turns, advantages) for turns in merged]
        return samples, drops

    def _defect(self, turn: Turn, runs: dict[ImageRef, tuple[int, ...] | str]) -> str | None:
        reason = turn_defect(turn, self.collator.forbidden_token_ids, self.max_tokens)
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
        if not runs_fit(turn.prompt_token_ids, self.collator.image_token_id, needed):
            return "placeholder_mismatch"
        return None

    def _runs(self, ref: ImageRef) -> tuple[int, ...] | str:
        """Runs of feature tokens that the image needs, or why it cannot be used.

        The image is always opened, for it may be damaged; it is processed once per size, which decides the runs.
        """
        try:
            image = self._open(ref)
        except (DataError, OSError, KeyError) as error:
            log.warning("image %s dropped: %s", ref.sha256[:12], error)
            return "image_missing" if is_missing(error) else "image_unreadable"
        if image.size not in self._runs_of_size:
            try:
                self._runs_of_size[image.size] = tuple(self.collator.process_image(image)[PLACEHOLDER_RUNS].tolist())
            except DataError as error:
                log.warning("image %s dropped: %s", ref.sha256[:12], error)
                return "image_unprocessable"
        return self._runs_of_size[image.size]

    def _open(self, ref: ImageRef) -> Image.Image:
        if self.images is None:
            raise ConfigurationError(
                "the rollouts have images, but the adapter has no image store",
                code="image_store_missing",
                where=type(self).__name__,
                remedy="pass images=ImageStore(root).open to get_adapter",
            )
        return self.images(ref)

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
                code="no_trainable_turn",
                where=f"{len(outputs.trajectories)} trajectories",
                remedy="look at the rollouts: every one has the defect that was counted",
            )
        return validate_batch(replace(self.collator.collate(samples, self._open), advantages=None))
