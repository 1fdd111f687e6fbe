"""Worker process that measures a dataset's episodes, started as `python -m
armature.components.robots.datasets.worker`."""

from __future__ import annotations

from typing import Any

from armature.components.artifacts.cache import DownloadCache
from armature.components.machine.workers.channel import serve
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.measure import MeasurementUnit, as_data, measure_unit
from armature.components.robots.datasets.remote import same_files


class MeasuringWorker:
    """Measures episodes of a dataset, whose files must have the same digest here as in the calling process."""

    def __init__(self, files: str, quick_digest: str) -> None:
        self._dataset = open_dataset(same_files(files, quick_digest, DownloadCache.standard()))

    def measure(self, first: int, last: int, numbers: list[str], images: list[str], every: bool) -> dict[str, Any]:
        """Compute the statistics of a part of the dataset, and return them as plain data (see `as_data`).

        The arguments are the fields of a `MeasurementUnit`, which describes the part.
        """
        return as_data(measure_unit(MeasurementUnit(first, last, tuple(numbers), tuple(images), every), self._dataset))

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(MeasuringWorker)
