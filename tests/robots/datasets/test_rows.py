"""Rows and images of a LeRobot dataset: every row gives the image of its own time, or an error that names its place.

The dataset itself has the expected values: each frame's state is a number, and its image's brightness is that number.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from fractions import Fraction

import av
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armature.components.artifacts.cache import DownloadCache
from armature.components.contracts.errors import DataError
from armature.components.robots.datasets.lerobot.frames import FrameReader
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.lerobot.writer import create_dataset
from tests.refusals import refused

from .conftest import layout

CAMERA, FPS, LENGTH = "observation.images.front", 10, 8
DATA, META = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
VIDEO = f"videos/{CAMERA}/chunk-000/file-000.mp4"
FROM, TO = f"videos/{CAMERA}/from_timestamp", f"videos/{CAMERA}/to_timestamp"


def images_of(numbers):
    return np.broadcast_to((7 * np.asarray(numbers))[:, None, None, None], (len(numbers), 32, 32, 3)).astype(np.uint8)


def write_numbered(root, first=0, keyframe_every=2, fps=FPS, **files):
    features = {"observation.state": Feature(dtype="float32", shape=(1,))}
    features |= {CAMERA: Feature(dtype="video", shape=(32, 32, 3))}
    chosen = layout(**files)
    chosen = chosen.model_copy(update={"video": chosen.video.model_copy(update={"keyframe_every": keyframe_every})})
    with create_dataset(root, fps=fps, robot_type=None, features=features, layout=chosen) as writer:
        for episode in range(3):
            numbers = first + np.arange(LENGTH * episode, LENGTH * (episode + 1))
            frames = {"observation.state": numbers.astype(np.float32), CAMERA: images_of(numbers)}
            writer.add_episode(frames, f"task {episode}")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    root = tmp_path_factory.mktemp("numbered") / "dataset"
    write_numbered(root)
    return root


@pytest.fixture
def copied(numbered, tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(numbered, tmp_path / "copy")
    return tmp_path / "copy"


def edit(root, name, change, same_types=True):
    """Replace the Parquet table in the file `name` by the result of `change`, which gets it as a pandas DataFrame."""
    table = pq.read_table(root / name)
    schema = table.schema if same_types else None
    pq.write_table(pa.Table.from_pandas(change(table.to_pandas()), schema=schema, preserve_index=False), root / name)


def edit_info(root, **values):
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def number_of(image):
    return round(float(np.asarray(image).mean()) / 7)


def shown(root, small=1 << 30):
    """Read each frame of a dataset. Return the number in its state, the number in its image read alone, and the number
    in its image read with the whole episode. If reading fails, return the place that the error names."""
    dataset, results = open_dataset(root), []
    reader = FrameReader(dataset, DownloadCache.standard())
    reader._small = small > 0
    for episode in dataset.episodes:
        try:
            every = np.arange(episode.length)
            states = reader.numbers("observation.state", episode, every)[:, 0].astype(int).tolist()
            images = [number_of(reader.image(CAMERA, episode, frame)) for frame in every]
            direct = map(number_of, dataset.images(CAMERA, episode, every.tolist()))
            results += zip(states, images, direct, strict=True)
        except DataError as error:
            results += [error.where] * episode.length
    return results


def cut(rows, dropped):
    """Return the rows of a table without the `dropped` frames of the second episode. Frames are numbered again, as a
    tool does that edits only rows."""
    remaining = rows[~rows.index.isin([LENGTH + each for each in dropped])].copy()
    remaining["frame_index"] = remaining.groupby("episode_index").cumcount()
    remaining["index"] = range(len(remaining))
    return remaining


def shorten(root, dropped):
    edit(root, DATA, lambda rows: cut(rows, dropped))
    lengths = np.array([LENGTH, LENGTH - len(dropped), LENGTH])
    ends = np.cumsum(lengths)
    edit(root, META, lambda t: t.assign(length=lengths, dataset_from_index=ends - lengths, dataset_to_index=ends))
    edit_info(root, total_frames=int(ends[-1]))


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["seeking", "decoded_once"])
@pytest.mark.parametrize("dropped", [(), (0, 1, 2), (6, 7), (0, 7)], ids=["whole", "start", "end", "both_ends"])
@pytest.mark.parametrize("renumbered", [True, False])
def test_cut_episode_reads_its_own_frames(copied, dropped, renumbered, small):
    shorten(copied, dropped)
    if not renumbered:
        begin = dropped.count(0) and min(set(range(LENGTH)) - set(dropped))
        edit(copied, DATA, lambda t: t.assign(frame_index=t.frame_index + begin * (t.episode_index == 1)))
    numbers = [n for n in range(3 * LENGTH) if n - LENGTH not in dropped]
    assert shown(copied, small) == [(n, n, n) for n in numbers]


def at(column, row, value):
    def change(rows):
        rows[column] = rows[column].astype(object)
        rows.loc[row, column] = value
        return rows

    return change


def swapped(rows):
    order = [*range(LENGTH), LENGTH + 1, LENGTH, *range(LENGTH + 2, 3 * LENGTH)]
    return rows.iloc[order].assign(frame_index=rows.frame_index.to_numpy(), index=rows["index"].to_numpy())


HOSTILE_ROWS = {
    "nan": (at("timestamp", 10, np.nan), 10),
    "negative": (lambda t: t.assign(timestamp=t.timestamp - 0.2 * (t.episode_index == 1)), 8),
    "twice": (at("timestamp", 10, 0.1), 10),
    "jump": (lambda t: t.assign(timestamp=t.timestamp + 0.3 * (t.index > 10)), 11),
    "drift": (lambda t: t.assign(timestamp=t.timestamp * 1.02), 1),
    "slow_drift": (lambda t: t.assign(timestamp=t.timestamp * 1.0011), 1),
    "backwards": (swapped, 9),
    "shuffled": (lambda t: t.iloc[[*range(8), 9, 8, *range(10, 24)]], 8),
    "frame_gap": (lambda t: t.assign(frame_index=t.frame_index + (t.index > 12)), 13),
    "frame_twice": (at("frame_index", 12, 3), 12),
    "frame_negative": (lambda t: t.assign(frame_index=t.frame_index - 1), 0),
    "frame_late": (lambda t: t.assign(frame_index=t.frame_index + 2 * (t.episode_index == 1)), 8),
    "index_late": (lambda t: t.assign(index=t["index"] + 1), 0),
    "other_episode": (at("episode_index", 9, 2), 9),
}


@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_rejects_unexpected_row_and_names_its_place(copied, name):
    change, row = HOSTILE_ROWS[name]
    edit(copied, DATA, change)
    dataset = open_dataset(copied)
    with pytest.raises(DataError) as caught:
        dataset.columns(["observation.state"], dataset.episodes[0], dataset.episodes[2])
    assert re.findall(r", episode (\d+), row (\d+)$", caught.value.where) == [(str(row // LENGTH), str(row))]
    reader = FrameReader(dataset, DownloadCache.standard())
    with pytest.raises(DataError):
        reader.image(CAMERA, dataset.episodes[row // LENGTH], row % LENGTH)


@pytest.mark.parametrize("column", ["timestamp", "frame_index", "index", "episode_index"])
@pytest.mark.parametrize("change", ["missing", "text", "lists"])
def test_rejects_column_of_another_type(copied, column, change):
    def apply(rows):
        if change == "missing":
            return rows.drop(columns=column)
        return rows.assign(**{column: [str(each) if change == "text" else [each] * 2 for each in rows[column]]})

    edit(copied, DATA, apply, same_types=False)
    assert all(isinstance(each, str) for each in shown(copied))


def test_rejects_gap_within_an_episode_and_names_the_row(copied):
    shorten(copied, (3, 4))
    places = shown(copied)
    assert all(f"episode 1, row {LENGTH + 3}" in place for place in places)


def test_rejects_clip_start_between_frames(copied):
    before = pq.read_table(copied / META).to_pandas()[FROM]
    for frames in (0.3, 0.5, 0.9, -0.4):
        edit(copied, META, lambda t, frames=frames: t.assign(**{FROM: before + frames / FPS * (t.index == 1)}))
        places = shown(copied)[LENGTH : 2 * LENGTH]
        assert all(isinstance(place, str) and "episode 1" in place for place in places)


def test_rejects_row_after_the_end_of_its_clip(copied):
    shorten(copied, (0, 1))
    edit(copied, META, lambda t: t.assign(**{FROM: t[FROM] + 2 / FPS * (t.index == 1)}))
    late = shown(copied)[LENGTH : 2 * LENGTH - 2]
    assert all(re.search(rf", episode 1, row {2 * LENGTH - 4}$", place) for place in late)


def test_rejects_fps_that_differs_from_the_rows(copied):
    for fps in (5, 9.9, 20):
        edit_info(copied, fps=fps)
        assert all(isinstance(each, str) for each in shown(copied))


@pytest.mark.parametrize("fps", [float("inf"), float("nan"), 0, -1, None, "fast"])
def test_rejects_invalid_fps(copied, fps):
    edit_info(copied, fps=fps)
    with refused("invalid_json" if isinstance(fps, float) else "invalid_dataset_info", "fps"):
        open_dataset(copied)


@pytest.mark.parametrize("column", ["timestamp", "frame_index", "index", "episode_index", "task_index"])
def test_rejects_info_without_required_columns(copied, column):
    features = json.loads((copied / "meta/info.json").read_text())["features"]
    missing = {name: feature for name, feature in features.items() if name != column}
    for changed in (missing, {**features, column: {"dtype": "video", "shape": [1]}}):
        edit_info(copied, features=changed)
        with refused("feature_missing", column):
            open_dataset(copied)


@pytest.mark.parametrize("fps", [1, 7.3, 24, 29.97, 30000 / 1001, 30, 59.94, 120, 31.4159])
def test_frames_match_rows_at_every_frame_rate(tmp_path, monkeypatch, fps):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    write_numbered(tmp_path / "new", fps=fps, keyframe_every=12)
    for small in (0, 1 << 30):
        assert shown(tmp_path / "new", small) == [(n, n, n) for n in range(3 * LENGTH)]


def write_video(path, times, numbers):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 90_000)
        stream.options = {"crf": "5"}
        for time, array in zip(times, images_of(numbers), strict=True):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            frame.pts, frame.time_base = round(time * 90_000), Fraction(1, 90_000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


@settings(max_examples=4, deadline=None)
@given(st.lists(st.lists(st.floats(0.05, 0.95), max_size=3), min_size=24, max_size=24), st.integers(0, 2**32 - 1))
@example([[0.5, 0.75], *[[]] * 22, [0.5, 0.75]], 0)  # the last keyframe is decoded before a frame that comes before it
def test_irregular_video_gives_the_nearest_frame(numbered, tmp_path_factory, between, seed):
    """The video has frames near the rows' times, within the tolerance, and others in between."""
    root = tmp_path_factory.mktemp("irregular") / "copy"
    shutil.copytree(numbered, root)
    jitter = np.random.default_rng(seed).uniform(0, 6e-5, 24)
    frames = {n / FPS + float(jitter[n]): n for n in range(24)}
    frames |= {(n + each) / FPS: 33 for n, others in enumerate(between) for each in others}
    frames = {round(time * 90_000) / 90_000: number for time, number in frames.items()}
    write_video(root / VIDEO, sorted(frames), [frames[time] for time in sorted(frames)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(root.parent / "cache"))
        for small in (0, 1 << 30):
            assert shown(root, small) == [(n, n, n) for n in range(24)]


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["seeking", "decoded_once"])
def test_float32_times_of_a_day_give_the_nearest_frame(copied, small):
    """At 10^5 s neighboring float32 numbers are 7.8 ms apart, and frames 10 ms."""
    times = 1e5 + np.arange(3 * LENGTH) / 100
    write_video(copied / VIDEO, times, np.arange(3 * LENGTH))
    edit(copied, DATA, lambda t: t.assign(timestamp=times.astype(np.float32)))
    edit(copied, META, lambda t: t.assign(**{FROM: 0.0, TO: 2e5}))
    edit_info(copied, fps=100)
    assert shown(copied, small) == [(n, n, n) for n in range(3 * LENGTH)]


def replace_in_place(path, content):
    """Write other content of the same size into a file, keeping its inode and time."""
    state = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size


def padded(video, size):
    return video + (size - len(video)).to_bytes(4, "big") + b"free" + bytes(size - len(video) - 8)


def other_video(root):
    write_numbered(root.parent / "other", first=3)
    replace_in_place(root / VIDEO, padded((root.parent / "other" / VIDEO).read_bytes(), PADDED))


def second_file(root):
    edit(root, META, lambda t: t.assign(**{f"videos/{CAMERA}/file_index": [0, 1, 0]}))


def shift(root):
    edit(root, DATA, lambda t: t.assign(timestamp=t.timestamp + 0.2 * (t.episode_index == 0)))
    edit(root, META, lambda t: t.assign(**{TO: t[TO] + 0.2 * (t.index == 0)}))


def boundaries(root):
    edit(root, META, lambda t: t.assign(dataset_to_index=[7, 16, 24], dataset_from_index=[0, 7, 16]))


def tasks_in_place(root):
    names = pd.Index(["task 2", "task 0", "task 1"], name="task")
    pd.DataFrame({"task_index": range(3)}, index=names).to_parquet(root.parent / "tasks.parquet")
    replace_in_place(root / "meta/tasks.parquet", (root.parent / "tasks.parquet").read_bytes())


def other_type(root):
    features = json.loads((root / "meta/info.json").read_text())["features"]
    edit_info(root, features=features | {"observation.state": {"dtype": "int64", "shape": [1]}})


PADDED = 1 << 16
REPAIRS = {
    "from_timestamp": lambda root: edit(root, META, lambda t: t.assign(**{FROM: t[FROM] - 0.1 * (t.index == 1)})),
    "to_timestamp": lambda root: edit(root, META, lambda t: t.assign(**{TO: t[TO] - 0.3 * (t.index == 1)})),
    "video_file": second_file,
    "video_content": other_video,
    "timestamps": shift,
    "episode_boundaries": boundaries,
    "fps": lambda root: edit_info(root, fps=20),
    "tasks": tasks_in_place,
    "shape": other_type,
}


def everything(root):
    try:
        dataset = open_dataset(root)
        reader = FrameReader(dataset, DownloadCache.standard())
        tasks = [reader.task(episode, 0) for episode in dataset.episodes]
        return tasks, shown(root)
    except DataError as error:
        return error.where


@pytest.mark.parametrize("name", REPAIRS)
def test_cache_key_covers_all_inputs(copied, monkeypatch, name):
    """Reading with the old dataset's cache gives the same as reading with an empty cache."""
    (copied / VIDEO).write_bytes(padded((copied / VIDEO).read_bytes(), PADDED))
    write_numbered(copied.parent / "third", first=5)
    shutil.copy(copied.parent / "third" / VIDEO, (copied / VIDEO).with_name("file-001.mp4"))
    before = everything(copied)
    REPAIRS[name](copied)
    warm = everything(copied)
    monkeypatch.setenv("ARMATURE_CACHE", str(copied.parent / "empty"))
    assert warm == everything(copied) != before


@pytest.mark.parametrize("name", ["meta/tasks.parquet", DATA, VIDEO])
def test_missing_file_error_names_the_file(copied, name):
    (copied / name).unlink()
    with pytest.raises(DataError) as caught:
        dataset = open_dataset(copied)
        FrameReader(dataset, DownloadCache.standard()).image(CAMERA, dataset.episodes[0], 0)
    assert name in caught.value.where


def tasks_of(root, table):
    pq.write_table(table, root / "meta/tasks.parquet")
    dataset = open_dataset(root)
    reader = FrameReader(dataset, DownloadCache.standard())
    return [reader.task(episode, 0) for episode in dataset.episodes]


def test_task_numbers_may_have_gaps(copied):
    edit(copied, DATA, lambda t: t.assign(task_index=t.task_index * 3))
    texts = {6: "third", 0: "nan", 3: "second", 9: ""}
    table = pa.table({"task": list(texts.values()), "task_index": list(texts)})
    assert tasks_of(copied, table) == ["nan", "second", "third"]
    assert dict(open_dataset(copied).tasks) == texts


HOSTILE_TASKS = {
    "null_text": ({"task": ["a", None, "c"], "task_index": [0, 1, 2]}, 1),
    "number_text": ({"task": [1, 2, 3], "task_index": [0, 1, 2]}, 0),
    "number_twice": ({"task": ["a", "b", "c"], "task_index": [0, 1, 1]}, 2),
    "null_number": ({"task": ["a", "b", "c"], "task_index": [0, None, 2]}, 0),
    "fraction": ({"task": ["a", "b", "c"], "task_index": [0.0, 1.5, 2.0]}, 0),
    "huge": ({"task": ["a", "b"], "task_index": pa.array([0, 2**64 - 1], pa.uint64())}, 1),
    "no_text": ({"task_index": [0, 1, 2]}, 0),
    "no_number": ({"task": ["a", "b", "c"]}, None),
}


@pytest.mark.parametrize("name", HOSTILE_TASKS)
def test_rejects_invalid_tasks_and_names_the_row(copied, name):
    columns, row = HOSTILE_TASKS[name]
    with pytest.raises(DataError) as caught:
        tasks_of(copied, pa.table(columns))
    assert caught.value.where.partition("tasks.parquet")[2] == (f", row {row}" if row is not None else "")
    assert caught.value.remedy
