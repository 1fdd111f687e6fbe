"""Building, writing and loading batches; bytes against storing pixels."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.rollouts import FAMILY, adapter_of, make_rollouts
from benchmarks.table import Row, alternate, seconds

GROUPS, GROUP_SIZE, SIDE, TOKENS = 16, 8, 224, 64


def measure() -> list[Row]:
    from armature.components.artifacts.images import ImageStore
    from armature.components.models.tiny import make_tiny_checkpoint
    from armature.components.rollouts.batches.table import build_batch, read_batch, write_batch
    from armature.components.rollouts.settings import BatchSettings
    from armature.components.vlm.loader import MicroBatchLoader
    from armature.components.vlm.packing import micro_batches

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        images = ImageStore(root / "images")
        adapter = adapter_of(make_tiny_checkpoint(FAMILY, root / "model", 0), images)
        outputs = make_rollouts(adapter, images, groups=GROUPS, group_size=GROUP_SIZE, side=SIDE, tokens=TOKENS)
        settings = BatchSettings.model_validate(
            {
                "advantage": {"name": "group_mean", "scale": "group_std"},
                "penalty": {"format": 0.0, "inadmissible": 0.0},
                "skip_zero_advantage": False,
                "max_sequence_tokens": 4096,
            }
        )
        samples = list(build_batch(outputs, adapter, settings).samples)
        rows = len(samples)

        def build_and_write() -> float:
            return rows / seconds(lambda: write_batch(root, build_batch(outputs, adapter, settings).samples))

        features = {ref: adapter.collator.process_image(images.open(ref)) for ref in {s.images[0] for s in samples}}
        pixels = root / "pixels"
        pixels.mkdir()

        def write_pixels() -> None:
            write_batch(pixels, samples)
            stacked = np.stack([features[s.images[0]]["pixel_values"].numpy() for s in samples])
            np.save(pixels / "pixels.npy", stacked)

        def build_and_write_pixels() -> float:
            def work() -> None:
                build_batch(outputs, adapter, settings)
                write_pixels()

            return rows / seconds(work)

        building = alternate(3, build_and_write, build_and_write_pixels)

        loader = MicroBatchLoader(adapter.collator, images, workers=0)

        def load() -> float:
            def work() -> None:
                loaded = read_batch(root)
                with loader.batch():
                    for _ in loader(micro_batches(loaded, range(rows), 16384, 64)):
                        pass

            return rows / seconds(work)

        def load_each_row() -> float:
            return rows / seconds(
                lambda: [adapter.collator.collate([sample], images.open) for sample in read_batch(root)]
            )

        loading = alternate(3, load, load_each_row)
        stored = sum(p.stat().st_size for p in (root / "images").rglob("*") if p.is_file())
        ours = (root / "batch.parquet").stat().st_size + stored
        theirs = sum(p.stat().st_size for p in pixels.iterdir())
    return [
        Row(
            "build and write",
            building.ours,
            building.baseline,
            "storing pixels",
            "rows/s",
            "higher",
            spread=building.spread,
        ),
        Row(
            "read and make tensors",
            loading.ours,
            loading.baseline,
            "processing every row's images",
            "rows/s",
            "higher",
            spread=loading.spread,
        ),
        Row(
            "bytes per row, images included",
            ours / rows,
            theirs / rows,
            "storing pixels",
            "bytes",
            "lower",
            f"{GROUPS} images of {SIDE} x {SIDE}, {GROUP_SIZE} rollouts each",
        ),
    ]
