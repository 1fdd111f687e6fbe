"""The index of episodes: a few bytes per episode, and the same episodes as a list of objects."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.settings import SourceSettings
from armature.components.robots.datasets.source import EpisodeSelection, _source, selection, split
from benchmarks.large_dataset import CAMERAS, LENGTH, write_dataset

EPISODES = 3000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets") / "large"
    write_dataset(root, EPISODES, video_files=60)
    return open_dataset(root)


def source_of(dataset, **settings):
    return _source(dataset, SourceSettings(path=str(dataset.root), tag="robot", **settings))


def test_index_takes_32_bytes_per_episode_and_video(large):
    assert large.episodes.numbers.nbytes == EPISODES * (32 + 32 * len(CAMERAS))
    assert isinstance(large.episodes.numbers, np.memmap)
    assert source_of(large).episodes.nbytes == 16


def test_pickled_index_contains_no_episodes(large):
    assert len(pickle.dumps(Mixture([source_of(large)], 5, 0))) < 4000
    copy = pickle.loads(pickle.dumps(large))
    assert large.tasks[7] == copy.tasks[7] == "put object 7 into the drawer" and len(copy.tasks) == 1000
    assert list(large.tasks.items())[-2:] == [(number, f"put object {number} into the drawer") for number in (998, 999)]
    assert copy == large and copy.episodes[EPISODES - 1] == large.episodes[-1]


def test_episodes_equal_rows_of_meta(large):
    rows = [row for path in sorted(large.root.glob("meta/episodes/*/*")) for row in pq.read_table(path).to_pylist()]
    begins: dict[tuple[int, int], int] = {}
    for row, episode in zip(rows, large.episodes, strict=True):
        place = row["data/chunk_index"], row["data/file_index"]
        begin = begins.setdefault(place, row["dataset_from_index"])
        assert (episode.index, episode.start, episode.stop) == (
            row["episode_index"],
            row["dataset_from_index"],
            row["dataset_to_index"],
        )
        assert (episode.chunk, episode.file) == place and episode.row == episode.start - begin
        for camera in CAMERAS:
            clip = episode.clips[camera]
            assert clip.chunk == row[f"videos/{camera}/chunk_index"]
            names = ("file_index", "from_timestamp", "to_timestamp")
            assert (clip.file, clip.start, clip.stop) == tuple(row[f"videos/{camera}/{name}"] for name in names)
    assert large.episodes[1234].tasks == tuple(rows[1234]["tasks"])
    assert [episode.index for episode in large.episodes[-2:]] == [EPISODES - 2, EPISODES - 1]
    with pytest.raises(IndexError):
        large.episodes[EPISODES]
    first, last = large.episodes.in_file(0, 1)
    assert (first.index, last.index) == (1000, 1999)


def test_split_samples_come_from_their_own_episodes(large):
    (training,), (heldout,) = split([source_of(large)], 0.1, seed=3)
    order = np.random.default_rng([3, 0]).permutation(EPISODES)
    assert (
        list(heldout.episodes) == sorted(order[: EPISODES // 10])
        and heldout.episodes.nbytes < 16 * len(heldout.episodes) + 1
    )
    assert sorted([*training.episodes, *heldout.episodes]) == list(range(EPISODES))
    mixture = Mixture([training, heldout], 2, seed=0)
    frames = [
        (source, episode, at) for source in (training, heldout) for episode in source.episodes for at in range(LENGTH)
    ]
    for number in (0, 7, 8, 9999, mixture.frames - 1):
        sample = mixture.sample(mixture.nth(number))
        source, episode, frame = frames[number]
        assert ((training, heldout)[sample.source] is source, sample.episode, sample.frame) == (True, episode, frame)
    assert mixture.frames == len(frames)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_episode_selection_equals_its_numbers(numbers):
    listed = sorted(numbers)
    runs = EpisodeSelection(listed)
    assert list(runs) == runs.numbers().tolist() == listed and len(runs) == len(listed)
    assert [number in runs for number in range(-1, 62)] == [number in numbers for number in range(-1, 62)]
    assert runs[-1] == listed[-1] and runs[1:3] == tuple(listed[1:3])
    assert selection(runs) is runs and list(selection(range(5))) == [0, 1, 2, 3, 4]
