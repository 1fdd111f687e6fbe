"""Files of datasets behind URLs, fetched before their samples are asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import PurePosixPath
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import fsspec

from armature.components.artifacts.fetched import FetchedFiles
from armature.components.datasets.file_shuffle import Window
from armature.components.datasets.mixture import Mixture

AT_ONCE = 4
"""Files that are fetched at the same time."""
STOP_WITHIN = 2.0
"""Seconds that are waited for the next part of a file to arrive, when fetching is stopped."""
log = logging.getLogger(__name__)


class FilePrefetch:
    """While positions of a window are read, the files of the next are fetched, where `mixture` has an order of files.

    Windows are fetched that are read to their end before position `stop`, so that no file is that nobody reads. A file
    that cannot be fetched is left to who reads it; who comes to one that is being fetched waits for it.
    """

    def __init__(self, mixture: Mixture, stop: int) -> None:
        self._shuffle, self._mixture, self._stop = mixture.file_shuffle, mixture, stop
        self._windows, self._asked = set[Window](), set[tuple[int, PurePosixPath]]()
        self._remote = {
            number: source.dataset.files
            for number, source in enumerate(mixture.sources)
            if isinstance(source.dataset.files, FetchedFiles) and not source.dataset.files.ranges
        }
        self._queue: SimpleQueue[tuple[int, PurePosixPath] | None] = SimpleQueue()
        self._stopped = threading.Event()
        needed = AT_ONCE if self._shuffle and self._remote else 0
        self._threads = [threading.Thread(target=self._fetch, daemon=True) for _ in range(needed)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing more is fetched, and nothing stays of a file that is half here."""
        self._stopped.set()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(STOP_WITHIN)

    def reach(self, positions: Iterable[int]) -> None:
        """These are read now."""
        if self._shuffle is None or not self._threads:
            return
        for window in map(self._shuffle.window, positions):
            if window.source not in self._remote or window in self._windows:
                continue
            self._windows.add(window)
            for each in self._shuffle.windows(window, self._stop):
                for first, stop in self._shuffle.frames(each):
                    for name in self._mixture.files(each.source, first, stop):
                        self._want(each.source, name)

    def _want(self, source: int, name: PurePosixPath) -> None:
        if (source, name) not in self._asked:
            self._asked.add((source, name))
            self._queue.put((source, name))

    def _fetch(self) -> None:
        while (wanted := self._queue.get()) and not self._stopped.is_set():
            source, name = wanted
            try:
                self._remote[source].fetch(name, fsspec.Callback(hooks={"stop": self._end_if_stopped}))
            except Exception as error:  # who reads the file meets it again
                if not self._stopped.is_set():
                    log.warning("not fetched ahead: %s", error)

    def _end_if_stopped(self, size: int | None, value: int, **_: Any) -> None:
        """Called by fsspec at each part of a file that arrives."""
        if self._stopped.is_set():
            raise InterruptedError("fetching was stopped")
