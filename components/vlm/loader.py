"""Loading micro-batches in worker processes. Each distinct image is processed once per batch."""

from __future__ import annotations

import fcntl
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.batches import MultimodalBatch
from armature.components.contracts.images import ImageRef
from armature.components.models.adapters.collate import SampleCollator
from armature.components.training.loading import ErrorCarrier, raise_errors
from armature.components.vlm.packing import MicroBatch, packed_batch

Job = tuple[MicroBatch, str]


class FeatureCache:
    """Image features in files of a folder that several processes share.

    The first process that needs an image processes it, while the others wait for its lock file; the lock is released if
    that process dies. Files are memory-mapped, so their memory belongs to the page cache.
    """

    def __init__(self, collator: SampleCollator, images: ImageStore, folder: Path) -> None:
        self.collator, self.images, self.folder = collator, images, folder

    def __call__(self, ref: ImageRef) -> dict[str, Tensor]:
        path = self.folder / f"{ref.sha256}.safetensors"
        if not path.exists():
            with (self.folder / f"{ref.sha256}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    self._process(ref, path)
        return load_file(path)

    def _process(self, ref: ImageRef, path: Path) -> None:
        features = self.collator.process_image(self.images.open(ref))
        new = path.with_suffix(".new")
        save_file({name: value.contiguous() for name, value in features.items()}, new)
        new.rename(path)


class BatchDataset(Dataset[tuple[MicroBatch, MultimodalBatch]]):
    """A dataset whose "index" is a complete job: a micro-batch, and the folder with the image features of its batch.

    Therefore the same worker processes can serve many batches.
    """

    def __init__(self, collator: SampleCollator, images: ImageStore, part: tuple[int, int]) -> None:
        self.collator, self.images, self.part = collator, images, part

    def __getitem__(self, job: Job) -> tuple[MicroBatch, MultimodalBatch]:
        micro, folder = job
        features = cache(FeatureCache(self.collator, self.images, Path(folder)))
        if micro.packed:
            return micro, packed_batch(self.collator, micro.samples, features, *self.part)
        return micro, self.collator.collate_features(micro.samples, features)


class MicroBatchLoader:
    """Turns planned micro-batches into tensors, in the order of the plan for any number of workers.

    Args:
        collator: the collator of the model's family; it is pickled and sent to the workers.
        images: the store with the samples' images.
        workers: number of worker processes; 0 builds micro-batches in this process when they are needed.
        scratch: folder for the image features of the current batch; by default the system's temporary folder.
        part: this rank's number among the ranks that share a packed micro-batch, and how many they are.
    """

    def __init__(
        self,
        collator: SampleCollator,
        images: ImageStore,
        workers: int,
        scratch: Path | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.scratch = scratch
        self._folder: str | None = None
        self._jobs: list[Job] = []
        options: dict[str, Any] = {}
        if workers:
            # One server process imports the modules that workers need. Workers are forked from it while it has a single
            # thread, which is safe, and they start without importing.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            options = {"multiprocessing_context": context, "persistent_workers": True, "prefetch_factor": 2}
        self._loader = DataLoader(
            ErrorCarrier(BatchDataset(collator, images, part)),
            batch_size=None,
            sampler=self._jobs,  # refilled for every plan
            num_workers=workers,
            **options,
        )

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Keep image features within this block, so that plans of the same batch share them; then delete them."""
        with tempfile.TemporaryDirectory(prefix="features-", dir=self.scratch) as self._folder:
            try:
                yield
            finally:
                self._folder = None

    def __call__(self, plan: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, MultimodalBatch]]:
        """Yield each micro-batch of `plan` with its tensors. Use it within `batch()`.

        Raises:
            DataError: an image is missing or damaged, or does not fit its row's placeholders.
        """
        assert self._folder is not None
        self._jobs[:] = [(micro, self._folder) for micro in plan]
        yield from raise_errors(self._loader)
