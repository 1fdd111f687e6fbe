"""Orders of samples: shuffling files for each rank, and shares of several sources."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.order import BLOCK, FileShuffle, MixtureSchedule, Window, mixed, permuted
from armature.components.robots.datasets.settings import FileShuffleSettings, SourceSettings
from armature.components.robots.datasets.source import _source, split
from benchmarks.large_dataset import CAMERAS, LENGTH, write_dataset

EPISODES, VIDEO_FILES = 300, 24


def order(files, lanes, window, seed=0, weights=None):
    """Return the shuffled order of frames. `files` has the number of frames of each file, or one such list for each of
    several sources."""
    sources = files if isinstance(files[0], list) else [files]
    bounds = [np.cumsum([0, *each]) for each in sources]
    return FileShuffle(weights or [1.0] * len(sources), bounds, FileShuffleSettings(lanes=lanes, window=window), seed)


def file_of(files, frame):
    return int(np.searchsorted(np.cumsum(files), frame, side="right"))


@settings(max_examples=60)
@given(
    files=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    lanes=st.integers(1, 9),
    window=st.integers(1, 6),
    seed=st.integers(0, 2**63 - 1),
)
def test_each_frame_once_per_epoch_with_at_most_window_open_files(files, lanes, window, seed):
    shuffle, size = order(files, lanes, window, seed), sum(files)
    for epoch in range(3):
        positions = range(epoch * size, (epoch + 1) * size)
        places = [shuffle.at(position) for position in positions]
        assert sorted(places) == [(0, frame) for frame in range(size)]
        for lane in range(lanes):
            lane_files = [
                file_of(files, place[1]) for at, place in zip(positions, places, strict=True) if at % lanes == lane
            ]
            used = {
                file: (lane_files.index(file), len(lane_files) - lane_files[::-1].index(file)) for file in lane_files
            }
            for turn in range(len(lane_files)):
                assert sum(first <= turn < stop for first, stop in used.values()) <= window


@settings(max_examples=30)
@given(
    files=st.lists(st.integers(5, 30), min_size=1, max_size=40),
    ranks=st.sampled_from([1, 2, 4, 8]),
    window=st.integers(1, 6),
)
def test_ranks_share_only_files_at_lane_cuts(files, ranks, window):
    """Ranks take positions as in the trainer: rank, rank + ranks, ..."""
    shuffle = order(files, 8, window)
    rank_files = [
        {file_of(files, shuffle.at(position)[1]) for position in range(rank, sum(files), ranks)}
        for rank in range(ranks)
    ]
    assert set().union(*rank_files) == set(range(len(files)))
    assert sum(map(len, rank_files)) <= len(files) + 7


def test_rank_reads_only_its_share_of_files():
    files = [20 + number % 7 for number in range(200)]
    size, shuffle = sum(files), order(files, 8, 4)
    for epoch in range(2):
        touched = {file_of(files, shuffle.at(p)[1]) for p in range(epoch * size, (epoch + 1) * size) if p % 8 == 3}
        assert 20 <= len(touched) <= 31


def test_order_depends_on_epoch_seed_and_window():
    files = [12] * 40
    first = [order(files, 8, 4).at(position) for position in range(960)]
    assert first[:480] != first[480:]
    assert first != [order(files, 8, 4, seed=1).at(position) for position in range(960)]
    assert first != [order(files, 8, 2).at(position) for position in range(960)]


def test_order_is_the_same_from_any_start_and_in_any_process():
    files = [7, 3, 30, 11, 5, 9]
    shuffle = order(files, 4, 2, seed=5)
    forward = [shuffle.at(position) for position in range(200)]
    copy = pickle.loads(pickle.dumps(shuffle))
    assert [order(files, 4, 2, seed=5).at(position) for position in range(199, -1, -1)] == forward[::-1]
    assert [copy.at(position) for position in range(0, 200, 3)] == forward[::3]
    far = 10**15
    assert len({shuffle.at(far - far % 65 + offset) for offset in range(65)}) == 65  # an epoch


def test_neighbor_distances_match_a_full_shuffle():
    """In a full shuffle the mean distance of two frames is a third of their number, and few neighbors share a file."""
    files, window = [100] * 640, 8
    size, shuffle = sum(files), order(files, 8, window)
    frames = np.array([shuffle.at(position)[1] for position in range(size // 10)])
    assert np.abs(np.diff(frames)).mean() == pytest.approx(size / 3, rel=0.05)
    batches = [{int(frame) // 100 for frame in frames[start : start + 32]} for start in range(0, len(frames), 32)]
    # 8 lanes draw 4 of 8 files: 8 * 8 (1 - (7/8)^4) = 26.5
    assert 24 < np.mean([len(batch) for batch in batches]) <= 32
    lane = frames[::8]
    same = np.mean(lane[1:] // 100 == lane[:-1] // 100)
    assert same == pytest.approx(1 / window, abs=0.04)
    within = lane[: 100 * window] % 100
    assert abs(np.corrcoef(within[1:], within[:-1])[0, 1]) < 0.12


def test_several_datasets_have_their_shares_and_own_lanes():
    """4 lanes of 1024 positions are whole blocks of the schedules, and here one epoch of each dataset."""
    files, lanes = [[32] * 32, [64] * 48], 4
    shuffle = order(files, lanes, 3, weights=[1.0, 3.0])
    places = [shuffle.at(position) for position in range(4096)]
    assert sorted(places) == [(source, frame) for source in (0, 1) for frame in range(sum(files[source]))]
    for source in (0, 1):
        lane_files = [
            {file_of(files[source], frame) for each, frame in places[lane::4] if each == source} for lane in range(4)
        ]
        assert sum(map(len, lane_files)) <= len(files[source]) + lanes - 1
        taken = Counter(at // 512 for at, place in enumerate(places) if place[0] == source)
        assert list(taken.values()) == pytest.approx([[128, 384][source]] * 8, abs=40)  # 4 standard deviations
    same = np.mean([one[0] == other[0] for one, other in pairwise(places)])
    assert same == pytest.approx(0.25**2 + 0.75**2, abs=0.04)  # lanes do not take turns in step


@settings(max_examples=15, deadline=None)
@given(
    files=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=9), min_size=1, max_size=2),
    lanes=st.integers(1, 4),
    window=st.integers(1, 3),
    stop=st.integers(0, 700),
)
def test_window_frames_equal_frames_read_by_its_positions(files, lanes, window, stop):
    shuffle = order(files, lanes, window, seed=3, weights=[1.0, 2.0][: len(files)])
    read: dict[Window, list[int]] = {}
    for position in range(900):
        read.setdefault(shuffle.window(position), []).append(shuffle.at(position)[1])
    whole = {each: frames for each, frames in read.items() if len(frames) == each.stop - each.first}
    for each, frames in whole.items():
        assert sorted(frames) == sorted(frame for first, end in shuffle.frames(each) for frame in range(first, end))
        assert len(shuffle.frames(each)) <= window
    in_time = Counter(map(shuffle.window, range(stop)))
    for each in in_time:
        near = [other for other in read if other[:3] in (each[:3], (each.source, each.lane, each.stop))]
        expected = [other for other in near if in_time[other] == other.stop - other.first]
        windows = shuffle.windows(each, stop)
        assert windows == sorted(expected) if len(files) == 1 else set(windows) <= set(expected)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets") / "films"
    write_dataset(root, EPISODES, VIDEO_FILES)
    return open_dataset(root)


def source_of(dataset, **facts):
    return _source(dataset, SourceSettings(path=str(dataset.root), tag="robot", **facts))


def test_file_bounds_follow_the_used_videos(dataset):
    episodes = EPISODES * len(CAMERAS) // VIDEO_FILES
    films = [number * episodes * LENGTH for number in range(VIDEO_FILES // len(CAMERAS))]
    assert dataset.episodes.file_starts(CAMERAS).tolist() == films
    assert dataset.episodes.file_starts(()).tolist() == [0]  # one file of data


def test_file_bounds_follow_the_camera_with_most_files(dataset):
    finer, coarser = pickle.loads(pickle.dumps(dataset.episodes)), pickle.loads(pickle.dumps(dataset.episodes))
    for index, episodes in ((finer, 20), (coarser, 40)):
        index.numbers = np.array(index.numbers)
        index.numbers["clips"]["file"][:, 1] = np.arange(EPISODES) // episodes
    assert finer.file_starts(CAMERAS).tolist() == list(range(0, EPISODES * LENGTH, 20 * LENGTH))
    assert finer.file_starts(CAMERAS[:1]).tolist() == dataset.episodes.file_starts(CAMERAS).tolist()
    assert coarser.file_starts(CAMERAS).tolist() == dataset.episodes.file_starts(CAMERAS).tolist()


@pytest.mark.parametrize("at_once", [1, 7, 24, 25, 26])
def test_file_starts_do_not_depend_on_block_ends(dataset, monkeypatch, at_once):
    whole = dataset.episodes.file_starts(CAMERAS).tolist()
    monkeypatch.setattr("armature.components.robots.datasets.lerobot.episodes.AT_ONCE", at_once)
    assert dataset.episodes.file_starts(CAMERAS).tolist() == whole


def test_rank_opens_only_videos_of_its_lanes(dataset):
    (training,), _ = split([source_of(dataset)], 0.2, seed=3)
    mixture = Mixture([training], 2, 0, FileShuffleSettings(lanes=4, window=2))
    size = mixture.frames
    places = [mixture.place(position) for position in range(2 * size)]
    for epoch in (places[:size], places[size:]):
        assert sorted(place.frame for place in epoch) == list(range(size))
    assert places[:size] != places[size:]
    episodes = [mixture._episode(place)[0] for place in places[:size]]
    assert {episode.index for episode in episodes} == set(training.episodes)
    films = [{episode.clips[CAMERAS[0]].file for episode in episodes[rank::4]} for rank in range(4)]
    assert len(set().union(*films)) == 12 and sum(map(len, films)) <= 12 + 3
    assert mixture[5].episode == episodes[5].index


@settings(max_examples=40)
@given(chosen=st.sets(st.integers(0, EPISODES - 1), min_size=1))
def test_selection_counts_frames_before_a_frame(dataset, chosen):
    runs = source_of(dataset, episodes=sorted(chosen)).episodes
    frames = np.arange(0, EPISODES * LENGTH + 1, 11)
    owned = np.repeat(np.isin(np.arange(EPISODES), sorted(chosen)), LENGTH)
    assert runs.frames(dataset.episodes).before(frames).tolist() == [int(owned[:frame].sum()) for frame in frames]


@settings(max_examples=60)
@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_permuted_is_a_permutation(size, key):
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_permuted_is_uniform_over_places():
    size, keys = 7, 1400
    counts = np.zeros((size, size))
    for key in range(keys):
        for index in range(size):
            counts[index, permuted(index, size, mixed(key))] += 1
    expected = keys / size
    assert ((counts - expected) ** 2 / expected).sum() < 75  # 36 degrees of freedom: one in 10,000 seeds above 75


def test_large_shuffle_has_no_trend():
    size = 1_000_003
    places = np.array([permuted(index, size, 5) for index in range(3000)]) / size
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.07
    assert np.histogram(places, 10, (0, 1))[0].min() > 220


@settings(max_examples=40)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), blocks=st.integers(1, 4), seed=st.integers(0, 9))
def test_schedule_gives_shares_and_counts_without_gaps(weights, blocks, seed):
    schedule = MixtureSchedule(weights, seed)
    taken: list[list[int]] = [[] for _ in weights]
    for position in range(blocks * BLOCK):
        source, before = schedule.at(position)
        taken[source].append(before)
    for weight, numbers in zip(weights, taken, strict=True):
        assert sorted(numbers) == list(range(len(numbers)))
        assert abs(len(numbers) - blocks * BLOCK * weight / sum(weights)) <= len(weights)


@settings(max_examples=20)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=4),
    position=st.integers(0, 3 * BLOCK),
    seed=st.integers(0, 9),
)
def test_passed_never_exceeds_taken_positions(weights, position, seed):
    schedule = MixtureSchedule(weights, seed)
    taken: list[set[int]] = [set() for _ in weights]
    for source, before in map(schedule.at, range(position)):
        taken[source].add(before)
    for source, numbers in enumerate(taken):
        passed = schedule.passed(position, source)
        assert numbers.issuperset(range(passed)) and passed >= len(numbers) - (BLOCK if len(weights) > 1 else 0)


def test_far_positions_are_exact_and_cheap():
    schedule = MixtureSchedule([0.1, 0.2, 0.7], 3)
    start = 10**15 // BLOCK * BLOCK
    counts = Counter(schedule.at(start + offset)[0] for offset in range(10 * BLOCK))
    assert [counts[source] for source in range(3)] == pytest.approx([256, 512, 1792], abs=3)


def test_every_rank_gets_all_sources():
    """Without shuffled blocks two sources of equal weight would alternate, and each of two ranks would get only one."""
    schedule = MixtureSchedule([1, 1], 0)
    even = [schedule.at(position)[0] for position in range(0, 4 * BLOCK, 2)]
    assert 0.4 < np.mean(even) < 0.6
