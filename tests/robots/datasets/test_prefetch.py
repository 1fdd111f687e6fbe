"""Prefetching of files: the same samples, no file downloaded twice or in vain, and errors where a file is read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from armature.components.artifacts import remote_folder
from armature.components.artifacts.cache import DownloadCache
from armature.components.robots.datasets import mixture as prefetch
from armature.components.robots.datasets.lerobot import frames
from armature.components.robots.datasets.lerobot.layout import LocalFiles
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.mixture import FilePrefetch, Mixture
from armature.components.robots.datasets.remote import open_files
from armature.components.robots.datasets.settings import FileShuffleSettings, SourceSettings
from armature.components.robots.datasets.source import _source
from benchmarks.large_dataset import CAMERAS, write_dataset
from tests.refusals import refused

EPISODES, VIDEO_FILES = 12, 24
ORDER = FileShuffleSettings(lanes=2, window=2)


class Store(LocalFileSystem):
    """A folder that acts as a slow remote store. It can be made to fail."""

    protocol = "slow"
    fetched: ClassVar[list[str]] = []
    part: ClassVar[Callable[[str], None]] = staticmethod(lambda name: None)
    """Function that is called for each of the two parts of a file when the part arrives."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("slow://"))

    def get_file(self, path: str, target: str, callback: Any, **_: Any) -> None:
        Store.fetched.append(path)
        data = Path(path).read_bytes()
        with Path(target).open("wb") as file:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                Store.part(path)
                file.write(half)
                callback.relative_update(len(half))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("datasets") / "films"
    write_dataset(root, EPISODES, VIDEO_FILES)
    return root


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Store]]:
    fsspec.register_implementation("slow", Store, clobber=True)
    monkeypatch.setattr(frames, "SMALL", 0)  # videos are read, not what was decoded of them once
    monkeypatch.setattr(remote_folder, "RETRY_WAITS_S", ())
    monkeypatch.setattr(Store, "fetched", [])
    monkeypatch.setattr(Store, "part", staticmethod(lambda name: None))
    yield Store


def mixture(files: Any, seed: int = 0) -> Mixture:
    return Mixture([_source(open_dataset(files), SourceSettings(path="films", tag="robot"))], 2, seed, ORDER)


@pytest.fixture
def remote(folder: Path, tmp_path: Path) -> Mixture:
    return mixture(open_files(f"slow://{folder}", None, DownloadCache(tmp_path / "files", 10**9)))


@pytest.fixture
def local(folder: Path) -> Mixture:
    return mixture(LocalFiles(folder))


def films(mixture: Mixture, positions: range) -> set[str]:
    """Return the videos that the samples at these positions need."""
    clips = [mixture._episode(mixture.place(position))[0].clips for position in positions]
    return {f"{key}/chunk-{each[key].chunk:03}/file-{each[key].file:03}.mp4" for each in clips for key in CAMERAS}


def videos(names: list[str]) -> list[str]:
    return [name.partition("/videos/")[2] for name in names if "/videos/" in name]


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def here(mixture: Mixture) -> set[str]:
    return {path.relative_to(mixture.sources[0].dataset.root / "videos").as_posix() for path in arrived(mixture)}


def arrived(mixture: Mixture) -> list[Path]:
    walk = os.walk(mixture.sources[0].dataset.root / "videos")  # folders may come and go while it lists them
    return [Path(folder, name) for folder, _, names in walk for name in names if fnmatch(name, "[!.]*.mp4")]


def first_window(mixture: Mixture) -> range:
    """Return the positions of all samples that come before any lane reaches its second window."""
    assert mixture.file_shuffle is not None
    return range(2 * min(mixture.file_shuffle.window(lane).stop for lane in range(2)))


def test_prefetch_keeps_samples_and_downloads_nothing_twice(remote: Mixture, local: Mixture, store) -> None:
    delays = np.random.default_rng(0)
    store.part = staticmethod(lambda name: time.sleep(delays.uniform(0, 0.01)))
    with FilePrefetch(remote, remote.frames) as files:
        for position in range(remote.frames):
            files.reach([position])
            actual, expected = remote[position], local[position]
            assert (actual.episode, actual.frame) == (expected.episode, expected.frame)
            np.testing.assert_array_equal(actual.actions, expected.actions)
            for camera in CAMERAS:
                np.testing.assert_array_equal(actual.observation.images[camera], expected.observation.images[camera])
    assert len(videos(store.fetched)) == VIDEO_FILES
    assert len(store.fetched) == len(set(store.fetched))


def test_prefetch_downloads_only_the_next_window(remote: Mixture, local: Mixture, store) -> None:
    reading = first_window(local)
    with FilePrefetch(remote, remote.frames) as files:
        files.reach(reading[:2])
        expected = films(local, reading)
        for lane in range(2):
            first = local.file_shuffle.window(lane)
            after = local.file_shuffle.window(lane + 2 * first.stop)
            expected |= films(local, range(lane, lane + 2 * after.stop, 2))
        wait(lambda: here(remote) == expected)
        assert len(expected) < VIDEO_FILES
        files.reach(reading)
        time.sleep(0.05)
    assert here(remote) == expected and sorted(videos(store.fetched)) == sorted(expected)


def test_prefetch_downloads_nothing_beyond_the_end_of_the_run(remote: Mixture, local: Mixture, store) -> None:
    short = first_window(local).stop // 2
    with FilePrefetch(remote, short) as files:
        files.reach(range(short))
        time.sleep(0.05)
    assert store.fetched == [name for name in store.fetched if "/meta/" in name]
    whole = first_window(local).stop + 2
    with FilePrefetch(remote, whole) as files:
        files.reach(range(whole))
        wait(lambda: bool(here(remote)))
    assert here(remote) <= films(local, range(whole))


def test_prefetch_error_is_raised_when_the_file_is_read(
    remote: Mixture, local: Mixture, store, caplog: pytest.LogCaptureFixture
) -> None:
    reading = first_window(local)
    later = next(
        at for at in range(reading.stop, local.frames) if films(local, range(at, at + 1)) - films(local, reading)
    )
    (lost,) = (
        name for name in films(local, range(later, later + 1)) - films(local, reading) if name.startswith(CAMERAS[0])
    )

    def fail(name: str) -> None:
        if name.endswith(lost):
            raise OSError("the store is away")

    store.part = staticmethod(fail)
    with FilePrefetch(remote, remote.frames) as files:
        for position in range(later):
            files.reach([position])
            np.testing.assert_array_equal(remote[position].actions, local[position].actions)
        wait(lambda: lost in caplog.text)
        files.reach([later])
        with refused("remote_file_not_fetched", lost, "the store is away"):
            remote[later]
        store.part = staticmethod(lambda name: None)
        np.testing.assert_array_equal(remote[later].actions, local[later].actions)
    assert "prefetch failed" in caplog.text


def test_closing_stops_downloads_and_leaves_no_partial_file(remote: Mixture, store) -> None:
    before, going = len(store.fetched), threading.Event()
    store.part = staticmethod(lambda name: going.wait(20))
    files = FilePrefetch(remote, remote.frames)
    files.reach(range(2))
    wait(lambda: len(store.fetched) == before + prefetch.AT_ONCE)
    threading.Timer(0.05, going.set).start()
    files.__exit__(None, None, None)
    assert not any(thread.is_alive() for thread in files._threads)
    assert len(store.fetched) == before + prefetch.AT_ONCE
    assert not arrived(remote) and not list(remote.sources[0].dataset.root.rglob(".new-*"))


def test_hanging_store_does_not_block_closing(remote: Mixture, store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "STOP_WITHIN", 0.05)
    before, never = len(store.fetched), threading.Event()
    store.part = staticmethod(lambda name: never.wait(20))
    with FilePrefetch(remote, remote.frames) as files:
        files.reach(range(2))
        wait(lambda: len(store.fetched) > before)
        begin = time.monotonic()
    assert time.monotonic() - begin < 5
    never.set()


def test_prefetch_respects_the_download_limit(folder: Path, local: Mixture, tmp_path: Path, store, caplog) -> None:
    sizes = {name: (folder / name).stat().st_size for name in LocalFiles(folder).names()}
    film = max(size for name, size in sizes.items() if name.endswith(".mp4"))
    limit = sum(size for name, size in sizes.items() if not name.endswith(".mp4")) + 3 * film
    limited = mixture(open_files(f"slow://{folder}", None, DownloadCache(tmp_path / "files", limit)))
    store.part = staticmethod(lambda name: time.sleep(0.02))
    with FilePrefetch(limited, limited.frames) as files:
        files.reach(range(2))
        wait(lambda: caplog.text.count("prefetch failed") + len(arrived(limited)) == len(files._asked) - 1)
    root = limited.sources[0].dataset.root
    assert limit - film < sum((root / name).stat().st_size for name in sizes if (root / name).is_file()) <= limit


def test_prefetch_skips_folders_and_byte_ranges(folder: Path, local: Mixture, tmp_path: Path) -> None:
    ranges = mixture(open_files(f"slow://{folder}", None, DownloadCache(tmp_path, 10**9, ranges=True)))
    for each in (local, ranges):
        with FilePrefetch(each, each.frames) as files:
            files.reach(range(4))
            assert not files._threads
    assert not arrived(ranges)
