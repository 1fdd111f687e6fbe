"""LeRobotDataset v3.0: written data can be read again, episodes stay separate, invalid descriptions are refused."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from armature.components.artifacts.cache import DownloadCache
from armature.components.contracts.errors import DataError
from armature.components.robots.datasets.lerobot import frames as frames_module
from armature.components.robots.datasets.lerobot.columns import sampled, to_numpy
from armature.components.robots.datasets.lerobot.frames import FrameReader
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.lerobot.writer import create_dataset
from tests.images import encoded, exif, scene
from tests.refusals import refused

from .conftest import FEATURES, LENGTHS, edit_cell, edit_table, frames_of, layout, write

FRONT, WRIST = "observation.images.front", "observation.images.wrist"


DATA, META = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"


def change(root, name, edit):
    path = root / name
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def assert_same(root, episodes):
    dataset = open_dataset(root)
    assert [episode.length for episode in dataset.episodes] == list(LENGTHS)
    assert [episode.tasks for episode in dataset.episodes] == [("task 0",), ("task 1",), ("task 0",)]
    for episode, frames in zip(dataset.episodes, episodes, strict=True):
        columns = dataset.columns(["observation.state", "action", "next.reward", "task_index"], episode)
        np.testing.assert_array_equal(columns["observation.state"], frames["observation.state"])
        np.testing.assert_array_equal(columns["next.reward"][:, 0], frames["next.reward"])
        assert {dataset.tasks[i] for i in columns["task_index"][:, 0]} == set(episode.tasks)
        every = range(episode.length)
        front = np.stack(list(dataset.images(FRONT, episode, every)))
        np.testing.assert_array_equal(front, frames[FRONT])
        wrist = np.stack(list(dataset.images(WRIST, episode, every)))
        assert np.abs(wrist.astype(int) - frames[WRIST]).max() <= 6  # a step of time is 15
    return dataset


def test_dataset_roundtrip(written):
    assert_same(*written)


def test_writer_starts_a_new_file_at_the_size_limit(tmp_path):
    tiny = {"data_files_size_in_mb": 1e-3, "video_files_size_in_mb": 1e-9, "chunks_size": 2}
    episodes = write(tmp_path / "split", **tiny)
    assert_same(tmp_path / "split", episodes)
    data = sorted(str(path.relative_to(tmp_path / "split")) for path in tmp_path.glob("split/data/*/*"))
    assert data == [f"data/chunk-{c:03d}/file-{f:03d}.parquet" for c, f in ((0, 0), (0, 1), (1, 0))]


def test_files_have_lerobots_layout(written):
    root, _ = written
    info = json.loads((root / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["fps"] == 10 and info["splits"] == {"train": "0:3"}
    assert info["features"]["timestamp"] == {"dtype": "float32", "shape": [1], "names": None}
    assert info["features"][WRIST]["info"]["video.codec"] == "h264"
    tasks = pd.read_parquet(root / "meta/tasks.parquet")
    assert tasks.loc["task 1", "task_index"] == 1
    table = pq.ParquetFile(root / "data/chunk-000/file-000.parquet")
    assert table.num_row_groups == len(LENGTHS)
    assert str(table.schema_arrow.field("action").type) == "fixed_size_list<element: float>[7]"
    hints = json.loads(table.schema_arrow.metadata[b"huggingface"])["info"]["features"]
    assert hints[FRONT] == {"_type": "Image"} and WRIST not in hints
    (row,) = pd.read_parquet(root / "meta/episodes/chunk-000/file-000.parquet")[1:2].to_dict("records")
    assert (row["dataset_from_index"], row["dataset_to_index"], row["length"]) == (7, 8, 1)
    assert row["videos/observation.images.wrist/from_timestamp"] == pytest.approx(0.7)
    assert len(row["stats/action/q99"]) == 7 and np.asarray(row["stats/action/count"]).item() == 1


def test_written_statistics_equal_the_values(written):
    root, episodes = written
    stats = open_dataset(root).stats
    actions = np.concatenate([frames["action"] for frames in episodes]).astype(np.float64)
    assert stats["action"]["q10"] == np.quantile(actions, 0.1, axis=0).tolist()
    assert stats["action"]["count"] == [sum(LENGTHS)]
    pixels = np.concatenate([frames[FRONT] for frames in episodes]).reshape(-1, 3) / 255
    assert np.shape(stats[FRONT]["mean"]) == (3, 1, 1)
    assert np.ravel(stats[FRONT]["q90"]).tolist() == np.quantile(pixels, 0.9, axis=0).tolist()


def test_action_chunks_are_padded_at_the_episode_end(written):
    root, episodes = written
    dataset = open_dataset(root)
    for episode, frames in zip(dataset.episodes, episodes, strict=True):
        chunks, padding = dataset.windows("action", episode, range(5))
        for frame in range(episode.length):
            for ahead in range(5):
                inside = frame + ahead < episode.length
                assert padding[frame, ahead] == (not inside)
                expected = frames["action"][frame + ahead if inside else -1]
                np.testing.assert_array_equal(chunks[frame, ahead], expected)


def test_item_has_past_and_future_windows_and_task(written):
    root, episodes = written
    windows = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.1, 0.0], FRONT: [-0.1, 0.0]}
    frames = FrameReader(open_dataset(root), DownloadCache.standard())
    item = frames.item(8, windows)  # the first frame of the third episode
    assert item["task"] == "task 0" and item["frame_index"] == 0 and item["timestamp"].shape == (1,)
    assert item["observation.state_is_pad"].tolist() == [True, False]
    np.testing.assert_array_equal(item["observation.state"], episodes[2]["observation.state"][[0, 0]])
    np.testing.assert_array_equal(item["action"], episodes[2]["action"][:3])
    np.testing.assert_array_equal(item[FRONT], episodes[2][FRONT][[0, 0]])
    assert item[WRIST].shape == (32, 32, 3)
    with refused("time_between_frames", 0.05):
        frames.item(8, {"action": [0.0, 0.05]})
    with pytest.raises(IndexError):
        frames.item(20, {})


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (99, 99), (100, 100), (161, 100), (10_000, 1000), (10**7, 10_000)]
)
def test_image_sampling_equals_lerobot(length, count):
    frames = sampled(length)
    assert len(frames) == count == len(set(frames)) and (frames[0], frames[-1]) == (0, length - 1)


OUTSIDE = [
    "/etc/{chunk_index}",
    "../{file_index:03d}.parquet",
    "data/../../{file_index}",
    "..\\{file_index}",
    "C:{file_index}",
]


@pytest.mark.parametrize("template", [*OUTSIDE, "data/{chunk_index.__class__}", "data/{0}"])
def test_rejects_path_outside_the_dataset(copied, template):
    change(copied, "meta/info.json", lambda info: info.update(data_path=template))
    dataset = open_dataset(copied)
    with refused("unsafe_file_name"):
        dataset.columns(["action"], dataset.episodes[0])
    with refused("unsafe_file_name"):
        dataset.info.video_file("../../secrets", 0, 0)


@pytest.mark.parametrize(
    ("edit", "code", "value"),
    [
        (lambda info: info.update(codebase_version="v2.1"), "dataset_version_unsupported", "v2.1"),
        (lambda info: info["features"]["action"].update(shape=[-7]), "invalid_dataset_info", "features.action.shape"),
        (lambda info: info.update(total_frames=21), "episode_count_mismatch", 20),
    ],
)
def test_rejects_impossible_info(copied, edit, code, value):
    change(copied, "meta/info.json", edit)
    with refused(code, value):
        open_dataset(copied)


def rewrite(root, edit):
    """Edit the columns of the dataset's only data file, and return the dataset opened again."""
    table = pq.read_table(root / DATA)
    columns = {name: table[name].to_pylist() for name in table.column_names}
    edit(columns)
    pq.write_table(pa.table(columns), root / DATA)
    return open_dataset(root)


def move_a_value(columns):
    """Replace two rows of 7 values by a row of 6 and a row of 8 values. The total number of values stays the same."""
    rows = columns["action"]
    rows[3], rows[4] = rows[3][:6], rows[3][6:] + rows[4]


def test_rejects_ragged_rows(copied):
    dataset = rewrite(copied, move_a_value)
    with refused("feature_ragged", "row 3"):
        dataset.columns(["action"], dataset.episodes[0])


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6), inner=st.integers(1, 3))
def test_nested_columns_are_read_by_shape_or_refused(lengths, inner):
    feature = Feature(dtype="float32", shape=(2, inner))
    rows = [[[float(100 * r + 10 * i + j) for j in range(inner)] for i in range(n)] for r, n in enumerate(lengths)]
    column = pa.chunked_array([pa.array(rows, pa.list_(pa.list_(pa.float32())))])
    if set(lengths) == {2}:
        assert to_numpy(column, "x", feature, "here").tolist() == np.reshape(rows, (len(rows), -1)).tolist()
        return
    with pytest.raises(DataError):
        to_numpy(column, "x", feature, "here")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([0.5, 1.0], "int64"), ([True, False], "int64"), ([1, 0], "bool"), (["1", "2"], "float32"), ([1, None], "int64")],
)
def test_rejects_values_of_another_type(values, dtype):
    with pytest.raises(DataError):
        to_numpy(pa.chunked_array([pa.array(values)]), "x", Feature(dtype=dtype, shape=(1,)), "here")


@pytest.mark.parametrize("number", [-1, 2, 10**6])
def test_rejects_unlisted_task_index(copied, number):
    dataset = rewrite(copied, lambda columns: columns["task_index"].__setitem__(9, number))
    frames = FrameReader(dataset, DownloadCache.standard())
    assert frames.task(dataset.episodes[2], 0) == "task 0"
    with refused("unknown_task_index", number, "episode 2, frame 1"):
        frames.task(dataset.episodes[2], 1)


@pytest.mark.parametrize("value", [None, -1, 0.5, "0"])
@pytest.mark.parametrize("column", ["data/chunk_index", "dataset_to_index", f"videos/{WRIST}/file_index"])
def test_rejects_episode_index_with_invalid_numbers(copied, column, value):
    edit_table(copied / META, lambda table: table.__setitem__(column, [value] * len(table)))
    with refused("invalid_episode_number", copied / META, column):
        open_dataset(copied)


def test_shape_mismatch_error_names_the_shape(copied):
    change(copied, "meta/info.json", lambda info: info["features"]["action"].update(shape=[6]))
    dataset = open_dataset(copied)
    with refused("frame_shape_mismatch", "action", [7], [6]):
        dataset.columns(["action"], dataset.episodes[0])


def test_rejects_empty_episode(copied):
    edit_table(copied / META, lambda table: table.__setitem__("dataset_to_index", [7, 7, 20]))
    with refused("episodes_not_contiguous", "episode 1", 7):
        open_dataset(copied)


def test_damaged_image_error_names_episode_and_frame(copied):
    edit_cell(copied / DATA, 10, FRONT, {"bytes": b"\x89PNG no", "path": None})
    dataset = open_dataset(copied)
    with refused("image_unreadable", "episode 2, frame 2"):
        list(dataset.images(FRONT, dataset.episodes[2], range(12)))


def test_stored_images_are_decoded_upright_on_white(copied):
    upright = Image.fromarray(scene()[..., :3])
    turned = encoded(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif(6))
    clear = encoded(Image.new("RGBA", upright.size, (9, 9, 9, 0)), "PNG")
    for frame, image in ((8, turned), (9, clear)):
        edit_cell(copied / DATA, frame, FRONT, {"bytes": image.data, "path": None})
    dataset = open_dataset(copied)
    shown, white = dataset.images(FRONT, dataset.episodes[2], range(2))
    assert np.array_equal(shown, upright)
    assert white.getcolors() == [(white.width * white.height, (255, 255, 255))]
    reader = FrameReader(dataset, DownloadCache.standard())
    assert np.array_equal(reader.image(FRONT, dataset.episodes[2], 0), upright)


def test_truncated_video_error_names_the_file(copied):
    (path,) = copied.glob("videos/*/*/*.mp4")

    def shift(table):
        table.loc[2, [f"videos/{WRIST}/from_timestamp", f"videos/{WRIST}/to_timestamp"]] += 0.5

    edit_table(copied / META, shift)
    dataset = open_dataset(copied)
    with refused("video_frame_missing", path, "episode 2"):
        list(dataset.images(WRIST, dataset.episodes[2], range(12)))
    path.write_bytes(path.read_bytes()[:200])
    with refused("foreign_file_unreadable", path):
        list(dataset.images(WRIST, dataset.episodes[2], [0]))


def images_of(root, monkeypatch, small):
    """Return the wrist image of each frame, or the error message if it cannot be read. `small` replaces the constant
    SMALL of the frame reader, which decides how it decodes a video."""
    monkeypatch.setattr(frames_module, "SMALL", small)
    dataset, images = open_dataset(root), []
    reader = FrameReader(dataset, DownloadCache.standard())
    for episode in dataset.episodes:
        for frame in range(episode.length):
            try:
                images.append(reader.image(WRIST, episode, frame).tobytes())
            except DataError as error:
                images.append(str(error))
    return images


def test_cached_video_frames_equal_decoded_frames(written, monkeypatch, tmp_path):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path))
    made = []
    monkeypatch.setattr(
        FrameReader, "_decode", lambda *arguments, real=FrameReader._decode: made.append(real(*arguments))
    )
    expected = images_of(written[0], monkeypatch, small=0)
    assert not made
    assert images_of(written[0], monkeypatch, small=1 << 30) == expected
    assert len(made) == len(LENGTHS) and len(set(expected)) > 1
    assert images_of(written[0], monkeypatch, small=1 << 30) == expected
    assert len(made) == len(LENGTHS)  # by another reader, from the same cache


def test_damaged_frame_does_not_affect_other_frames(copied, monkeypatch):
    (video,) = copied.glob("videos/observation.images.wrist/*/*.mp4")
    data = bytearray(video.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    video.write_bytes(data)
    expected = images_of(copied, monkeypatch, small=0)
    assert {type(each) for each in expected} == {bytes, str}  # some can be had, and some cannot
    assert images_of(copied, monkeypatch, small=1 << 30) == expected


@pytest.fixture
def creating(tmp_path):
    return create_dataset(tmp_path / "new", fps=10, robot_type=None, features=FEATURES, layout=layout())


def test_dataset_appears_atomically(creating, tmp_path):
    bad = frames_of(5, 0)
    bad["action"][3, 2] = np.nan
    with refused("feature_not_finite", "action") as caught, creating as writer:
        writer.add_episode(frames_of(7, 1), "task")
        writer.add_episode(bad, "task")
    assert caught.value.where == "episode 1, frame 3"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("edit", "code", "value"),
    [
        (lambda frames: frames.pop("action"), "features_mismatch", "action"),
        (lambda frames: frames.update(action=frames["action"][:, :6]), "frame_shape_mismatch", "action"),
        (lambda frames: frames.update(action=frames["action"][:3]), "frame_counts_differ", [3, 5]),
        (lambda frames: frames.update({FRONT: np.zeros((5, 32, 32, 3))}), "image_not_uint8", FRONT),
    ],
)
def test_rejects_frames_that_do_not_fit(creating, edit, code, value):
    frames = frames_of(5, 0)
    edit(frames)
    with refused(code, value), creating as writer:
        writer.add_episode(frames, "task")
