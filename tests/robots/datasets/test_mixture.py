"""Mixtures: samples equal the datasets' frames, in shares by weight, from any position and in any process."""

from __future__ import annotations

import pickle
import shutil
from collections import Counter
from itertools import islice

import numpy as np
import pyarrow.parquet as pq
import pytest

from armature.components.configuration.stages import run_stage
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.mixture import FrameIndex, Mixture
from armature.components.robots.datasets.settings import DatasetSettings, QuantileStatsSettings
from armature.components.robots.datasets.source import local_folder, open_sources, pinned, split
from armature.components.robots.datasets.stage import read_statistics
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import FEATURES, LENGTHS, layout

OTHER = {
    "state": Feature(dtype="float64", shape=(3,)),
    "joints": Feature(dtype="float32", shape=(2,)),
    "top": Feature(dtype="image", shape=(8, 8, 3)),
}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Write a dataset of another robot with another frame rate and other names; values identify episode and frame."""
    root = tmp_path_factory.mktemp("datasets") / "other"
    with create_dataset(root, fps=5, robot_type=None, features=OTHER, layout=layout()) as writer:
        for number, length in enumerate((4, 6)):
            values = 100 * number + np.arange(length)[:, None]
            images = np.broadcast_to((values % 256)[:, :, None, None], (length, 8, 8, 3)).astype(np.uint8)
            frames = {"state": np.tile(values, 3) / 3, "joints": np.tile(values, 2), "top": images}
            writer.add_episode(frames, f"other {number}")
    return root


def named(path, tag="small", weight=1.0, **facts):
    return {"path": str(path), "tag": tag, "weight": weight, **facts}


SMALL = {"cameras": {"front": "observation.images.front", "wrist": "observation.images.wrist"}}
NAMES = {"state": "state", "action": "joints", "cameras": {"front": "top"}, "horizon": 2}


def artifact(store, *sources):
    settings = pinned(DatasetSettings.model_validate({"sources": sources}))
    return run_stage("dataset", settings, {}, make_machine(store=store))


@pytest.fixture(scope="module")
def mixed_sources(written, other, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    dataset = artifact(store, named(written[0], weight=3, **SMALL), named(other, "other", 1, **NAMES))
    return open_sources(dataset.path)


def test_sample_equals_dataset_content(mixed_sources, written):
    mixture = Mixture(mixed_sources, horizon=5, seed=0)
    assert mixture.horizons == (5, 2) and mixture.horizon == 5 and mixture.frames == sum(LENGTHS) + 10
    frames = written[1][2]
    sample = mixture.sample(FrameIndex(0, 7 + 1 + 9))
    assert (sample.episode, sample.frame, sample.tag, sample.source) == (2, 9, "small", 0)
    assert sample.observation.task == "task 0" and list(sample.observation.images) == ["front", "wrist"]
    np.testing.assert_array_equal(sample.observation.state, frames["observation.state"][9])
    np.testing.assert_array_equal(sample.observation.images["front"], frames["observation.images.front"][9])
    wrist = sample.observation.images["wrist"].astype(int)
    assert np.abs(wrist - frames["observation.images.wrist"][9]).max() <= 6  # a step of time is 15
    np.testing.assert_array_equal(sample.actions, frames["action"][[9, 10, 11, 11, 11]])
    assert sample.padding.tolist() == [False, False, False, True, True]


def test_sources_have_their_own_names_horizons_and_types(mixed_sources):
    sample = Mixture(mixed_sources, horizon=5, seed=0).sample(FrameIndex(1, 4 + 5))
    assert (sample.episode, sample.frame, sample.tag, sample.observation.task) == (1, 5, "other", "other 1")
    assert sample.observation.state.tolist() == pytest.approx([35.0] * 3) and sample.observation.state.dtype == "f4"
    assert sample.actions.tolist() == [[105, 105]] * 2 and sample.padding.tolist() == [False, True]
    assert sample.observation.images["front"].tolist() == np.full((8, 8, 3), 105).tolist()


def test_shares_follow_weights_and_sources_repeat_only_after_all_frames(mixed_sources):
    mixture = Mixture(mixed_sources, horizon=1, seed=4)
    places = [mixture.place(position) for position in range(1024)]
    assert Counter(place.source for place in places) == {0: 768, 1: 256}
    ones = [place.frame for place in map(Mixture(mixed_sources[:1], 1, 4).place, range(60))]
    epochs = [ones[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    counts = Counter(place.frame for place in places if place.source == 0)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_order_depends_on_seed_and_survives_pickling(mixed_sources):
    mixture = Mixture(mixed_sources, horizon=3, seed=1)
    places = [mixture.place(position) for position in range(100)]
    assert places == [Mixture(mixed_sources, horizon=9, seed=1).place(position) for position in range(100)]
    assert places != [Mixture(mixed_sources, horizon=3, seed=2).place(position) for position in range(100)]
    first = mixture[41]
    copy = pickle.loads(pickle.dumps(mixture))
    again = copy[41]
    assert (again.source, again.episode, again.frame) == (first.source, first.episode, first.frame)
    np.testing.assert_array_equal(again.actions, first.actions)
    for key, image in first.observation.images.items():
        np.testing.assert_array_equal(again.observation.images[key], image)


def test_training_never_uses_heldout_episodes(mixed_sources):
    training, heldout = split(mixed_sources, held_out=0.4, seed=0)
    assert [len(source.episodes) for source in training] == [2, 1]
    for source, left, right in zip(mixed_sources, training, heldout, strict=True):
        assert sorted([*left.episodes, *right.episodes]) == list(source.episodes)
    held = Mixture(heldout, horizon=1, seed=0)
    assert {held.sample(place).episode for place in held.every() if place.source == 0} == set(heldout[0].episodes)
    assert len(list(held.every())) == held.frames
    mixture = Mixture(training, horizon=1, seed=0)
    for position in range(40):
        place = mixture.place(position)
        assert mixture.sample(place).episode in training[place.source].episodes
    assert split(mixed_sources, 0, seed=0) == (mixed_sources, ())
    with refused("heldout_too_large"):
        split(mixed_sources, 0.9, seed=0)


def test_every_yields_each_frame_once_in_order(mixed_sources):
    mixture = Mixture(mixed_sources[1:], horizon=1, seed=0)
    assert [mixture.actions(place)[0][0, 0] for place in mixture.every()] == [0, 1, 2, 3, *range(100, 106)]


def test_statistics_are_exact_over_all_datasets_of_a_tag(written, other, tmp_path):
    dataset = artifact(
        tmp_path,
        named(written[0], "small", episodes=[2, 0]),
        named(other, "other"),
        named(written[0], "small", episodes=[1]),
    )
    settings = QuantileStatsSettings(features=("timestamp",), images="all")
    measured = run_stage("quantile-stats", settings, {"dataset": dataset}, make_machine(store=tmp_path))
    stats = read_statistics(measured.path, [source.tag for source in open_sources(dataset.path)])
    assert list(stats) == ["small", "other"]
    times = np.concatenate([np.arange(length) / 10 for length in LENGTHS]).astype(np.float32).astype(float)
    assert stats["small"]["timestamp"]["q90"] == [np.quantile(times, 0.9)]
    assert stats["small"]["timestamp"]["count"] == [sum(LENGTHS)]
    np.testing.assert_allclose(stats["small"]["timestamp"]["std"], times.std(), rtol=1e-12)
    assert stats["other"]["timestamp"]["max"] == [1.0] and stats["other"]["timestamp"]["count"] == [10]
    rows = pq.read_table(measured.path / "tags/small/episodes.parquet").select(["source", "episode_index"])
    assert [tuple(row.values()) for row in rows.to_pylist()] == [(0, 0), (0, 2), (2, 1)]
    assert 'href="tags/small/report.html"' in (measured.path / "report.html").read_text()
    with refused("statistics_missing", "third"):
        read_statistics(measured.path, ["small", "third"])


def test_rejects_different_robots_with_one_tag(other, tmp_path):
    copy = tmp_path / "copy"
    features = OTHER | {"joints": Feature(dtype="float32", shape=(4,))}
    with create_dataset(copy, fps=5, robot_type=None, features=features, layout=layout()) as writer:
        frames = {"state": np.zeros((2, 3)), "joints": np.zeros((2, 4)), "top": np.zeros((2, 8, 8, 3), np.uint8)}
        writer.add_episode(frames, "task")
    dataset = artifact(tmp_path / "store", named(other), named(copy))
    settings = QuantileStatsSettings(features=("joints",), images="all")
    with refused("feature_widths_differ", "joints", [2, 4]):
        run_stage("quantile-stats", settings, {"dataset": dataset}, make_machine(store=tmp_path / "store"))


def test_recorded_dataset_can_be_opened_as_source(written, tmp_path):
    shutil.copytree(written[0], tmp_path / "artifact/dataset")
    (source,) = open_sources(tmp_path / "artifact")
    assert (source.tag, source.state, source.action) == ("default", "observation.state", "action")
    assert list(source.cameras) == ["observation.images.front", "observation.images.wrist"]
    assert source.dataset.info.total_frames == sum(LENGTHS)
    (mixed,) = open_sources(artifact(tmp_path / "store", named(tmp_path / "artifact", "robot")).path)
    assert mixed.tag == "robot" and mixed.dataset.root == tmp_path / "artifact/dataset"
    with refused("dataset_not_in_folder", "augment.in_place"):
        local_folder(DatasetSettings(path=str(tmp_path / "artifact")))


@pytest.mark.parametrize(
    ("facts", "code", "value"),
    [
        ({"cameras": {"front": "action"}}, "feature_not_a_camera", "action"),
        ({"cameras": {"front": "top"}}, "unknown_feature", "top"),
        ({"state": "observation.images.front"}, "feature_not_numeric", "observation.images.front"),
        ({"action": "actions"}, "unknown_feature", "actions"),
        ({"episodes": [3]}, "unknown_episode", 3),
    ],
)
def test_rejects_source_that_does_not_fit_its_dataset(written, tmp_path, facts, code, value):
    with refused(code, value):
        artifact(tmp_path, named(written[0], **facts))


def test_dataset_without_actions_can_be_measured_but_not_trained_on(other, tmp_path):
    sources = open_sources(artifact(tmp_path, named(other)).path)
    with refused("unknown_feature", "action"):
        Mixture(sources, horizon=1, seed=0)


@pytest.mark.parametrize("values", [{"path": None}, {"path": "a", "sources": [named("b")]}])
def test_settings_require_either_path_or_sources(values):
    with refused("value_error"):
        DatasetSettings.model_validate(values)


def test_changed_file_is_read_again(written, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(written[0], root)
    before = Mixture(open_sources(artifact(tmp_path, named(root)).path), 1, 0).actions(FrameIndex(0, 0))[0]
    shutil.rmtree(root)
    features = {name: FEATURES[name] for name in ("action", "observation.state")}
    with create_dataset(root, fps=10, robot_type=None, features=features, layout=layout()) as writer:
        writer.add_episode({"action": np.full((3, 7), 9.0), "observation.state": np.zeros((3, 8))}, "task")
    again = open_sources(artifact(tmp_path, named(root)).path)
    assert Mixture(again, 1, 0).actions(FrameIndex(0, 0))[0].tolist() == [[9.0] * 7] != before.tolist()
    assert list(islice(Mixture(again, 1, 0).every(), 9)) == [FrameIndex(0, frame) for frame in range(3)]
