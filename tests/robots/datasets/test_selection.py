"""Samples of chosen frames, by task and by a mark, and subtasks of LeRobot's format v3.1 as prompts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from armature.components.artifacts.manifest import read_manifest
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import run_stage
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.settings import (
    DatasetSettings,
    FileShuffleSettings,
    QuantileStatsSettings,
    SourceSettings,
)
from armature.components.robots.datasets.source import _source, counted, pinned, split
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import layout

FPS, LENGTHS, TASKS = 10, (7, 5, 6, 9), ("open", "close", "open", "wipe")
FEATURES = {
    "observation.state": Feature(dtype="float32", shape=(1,)),
    "action": Feature(dtype="float32", shape=(2,)),
    "intervention": Feature(dtype="bool", shape=(1,)),
    "advantage": Feature(dtype="float64", shape=(1,)),
    "note": Feature(dtype="string", shape=(1,)),
}
ADVANTAGES = [np.zeros(7), np.full(5, 1e39), np.full(6, 1.5), np.array([1, -1, 0, 2, 0, 0, 0, 0, 0])]
MARKED = [np.arange(length) % 4 >= 2 for length in LENGTHS]
SPOKEN = {0: [(0.0, "reach"), (0.3, "pull")], 1: [(0.0, "push")], 2: [(0.2, "late")], 3: []}
ROW = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.string()),
        pa.field("style", pa.string()),
        pa.field("timestamp", pa.float32(), nullable=False),
        pa.field("camera", pa.string()),
        pa.field("tool_calls", pa.list_(pa.string())),
    ]
)


@pytest.fixture
def dataset(tmp_path):
    """Write a dataset in which the state is the frame's index in the dataset."""
    root = tmp_path / "marked"
    files = layout(data_files_size_in_mb=1e-4)  # a file an episode
    with create_dataset(root, fps=FPS, robot_type=None, features=FEATURES, layout=files) as writer:
        for number, length in enumerate(LENGTHS):
            state = sum(LENGTHS[:number]) + np.arange(length, dtype=np.float32)
            frames = {
                "observation.state": state,
                "action": np.stack([state, state], 1),
                "intervention": MARKED[number],
                "advantage": ADVANTAGES[number].astype(float),
                "note": np.array(["x"] * length),
            }
            writer.add_episode(frames, TASKS[number])
    return root


def as_lerobot(cells: list[Any]) -> pa.Array:
    """Return the column with tool calls of Arrow's type for JSON, which PyArrow does not make from Python objects."""
    lists = pa.array(cells, pa.list_(ROW))
    rows = lists.flatten()
    calls = rows.field("tool_calls")
    values = pa.ExtensionArray.from_storage(pa.json_(), calls.values)
    fields = [rows.field(name) for name in ROW.names[:-1]]
    typed = [*fields, pa.ListArray.from_arrays(calls.offsets, values)]
    return pa.ListArray.from_arrays(lists.offsets, pa.StructArray.from_arrays(typed, names=ROW.names))


def annotate(root, spoken: dict[int, list[Any]]):
    """Add the language columns of v3.1, with other styles beside the subtasks, as LeRobot writes them."""
    info = json.loads((root / "meta/info.json").read_text())
    info["codebase_version"] = "v3.1"
    info["features"] |= {
        name: {"dtype": "language", "shape": [1], "names": None} for name in ("language_persistent", "language_events")
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    for path in sorted(root.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        cells = []
        for episode in table["episode_index"].to_pylist():
            rows = [("subtask", time, text) for time, text in reversed(spoken[episode])]
            rows += [("plan", 0.0, "1. plan"), ("memory", 0.4, "remember")]
            facts = {"role": "assistant", "camera": None, "tool_calls": ['{"name": "say"}']}
            cells.append([facts | {"style": style, "timestamp": time, "content": text} for style, time, text in rows])
        table = table.append_column("language_persistent", as_lerobot(cells))
        events = pa.array([[]] * len(table), pa.list_(pa.struct([("role", pa.string())])))
        pq.write_table(table.append_column("language_events", events), path)


def source(root, **settings):
    return _source(open_dataset(root), SourceSettings(path=str(root), tag="robot", **settings))


def made_dataset(root, tmp_path, **settings):
    """Run the stage `dataset`, with which a recipe opens it before anything is computed."""
    chosen = {"path": str(root), "tag": "robot"} | settings
    return run_stage(
        "dataset",
        pinned(DatasetSettings.model_validate({"sources": [chosen]})),
        {},
        make_machine(store=tmp_path / "store"),
    )


def indices(mixture, positions):
    return [int(mixture[position].observation.state[0]) for position in positions]


@pytest.mark.parametrize("order", [None, FileShuffleSettings(lanes=2, window=2)])
@pytest.mark.parametrize(
    "choice",
    [
        {"frame_weights": "intervention"},
        {"tasks": ("open",)},
        {"tasks": ("wipe", "open"), "frame_weights": "intervention"},
        {"tasks": ("open",), "frame_weights": "intervention", "episodes": (1, 2, 3)},
    ],
)
def test_an_epoch_has_the_chosen_frames_once(dataset, choice, order) -> None:
    expected = [
        sum(LENGTHS[:number]) + frame
        for number, length in enumerate(LENGTHS)
        for frame in range(length)
        if (TASKS[number] in choice.get("tasks", TASKS))
        and ("frame_weights" not in choice or MARKED[number][frame])
        and number in choice.get("episodes", range(len(LENGTHS)))
    ]
    chosen = source(dataset, **choice)
    mixture = Mixture([chosen], 3, 0, order)
    assert mixture.frames == len(expected) == counted([chosen])["frames"]
    assert sorted(indices(mixture, range(len(expected)))) == expected
    assert [int(mixture.sample(place).observation.state[0]) for place in mixture.every()] == expected


def test_actions_go_on_over_frames_that_are_not_chosen(dataset) -> None:
    mixture = Mixture([source(dataset, frame_weights="intervention", episodes=(0,))], 3, 0)
    samples = [mixture.sample(place) for place in mixture.every()]
    assert [sample.actions[:, 0].tolist() for sample in samples] == [[2, 3, 4], [3, 4, 5], [6, 6, 6]]
    assert [sample.padding.tolist() for sample in samples][-1] == [False, True, True]


def test_held_out_episodes_are_chosen_from_alike(dataset) -> None:
    training, heldout = split([source(dataset, frame_weights="intervention")], 0.25, seed=0)
    counts = [sum(int(MARKED[number].sum()) for number in part[0].episodes) for part in (training, heldout)]
    assert [Mixture(list(part), 2, 0).frames for part in (training, heldout)] == counts
    assert sum(counts) == sum(int(marked.sum()) for marked in MARKED)


def test_episodes_without_a_chosen_frame_are_not_held_out(dataset) -> None:
    chosen = source(dataset, tasks=("open",))
    assert counted([chosen])["episodes"] == 2
    for seed in range(4):
        parts = split([chosen], 0.25, seed)
        assert sorted(number for (part,) in parts for number in part.episodes) == [0, 2]


@pytest.mark.parametrize(("episodes", "frame"), [((1,), 7), ((3,), 19)])  # more than float32 can hold, less than 0
def test_frame_with_an_invalid_weight_is_refused(dataset, episodes, frame) -> None:
    with refused("invalid_frame_weight", f"frame {frame}", kind=DataError):
        Mixture([source(dataset, frame_weights="advantage", episodes=episodes)], 2, 0)


def test_invalid_weights_of_frames_that_are_not_chosen_do_not_matter(dataset) -> None:
    weights = {"frame_weights": "advantage", "tasks": ("open",)}
    for choice in (weights, {"frame_weights": "advantage", "episodes": (0, 2)}):
        mixture = Mixture([source(dataset, **choice)], 2, 0)
        assert mixture.frames == LENGTHS[2] and mixture[0].weight == 1.5


@pytest.fixture
def unknown_elsewhere(dataset):
    """Give the dataset weights that are not numbers outside of the task "open"."""
    for path in dataset.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        if TASKS[table["episode_index"][0].as_py()] != "open":
            column = pa.array(np.full(len(table), np.nan))
            pq.write_table(table.set_column(table.column_names.index("advantage"), "advantage", column), path)
    return dataset


def test_weights_that_are_not_numbers_matter_only_in_chosen_frames(unknown_elsewhere, tmp_path) -> None:
    chosen = {"frame_weights": "advantage", "tasks": ("open",)}
    mixture = Mixture([source(unknown_elsewhere, **chosen)], 2, 0)
    assert mixture.frames == LENGTHS[2] and mixture[0].weight == 1.5
    made = made_dataset(unknown_elsewhere, tmp_path, **chosen)
    measured = run_stage(
        "quantile-stats", QuantileStatsSettings(), {"dataset": made}, make_machine(store=tmp_path / "store")
    )
    assert "advantage" not in json.loads((measured.path / "stats.json").read_text())
    with refused("invalid_frame_weight", kind=DataError):
        made_dataset(unknown_elsewhere, tmp_path, frame_weights="advantage")


def test_subtask_is_the_latest_one_that_has_begun(dataset) -> None:
    annotate(dataset, SPOKEN)
    mixture = Mixture([source(dataset, prompt="subtask", episodes=(0, 1))], 2, 0)
    prompts = [mixture.sample(place).observation.task for place in mixture.every()]
    assert prompts == ["reach"] * 3 + ["pull"] * 4 + ["push"] * 5
    tasks = Mixture([source(dataset, episodes=(0, 1))], 2, 0)
    assert [tasks.sample(place).observation.task for place in tasks.every()] == ["open"] * 7 + ["close"] * 5


def test_frame_before_the_first_subtask_is_refused(dataset, tmp_path) -> None:
    annotate(dataset, SPOKEN)
    mixture = Mixture([source(dataset, prompt="subtask", episodes=(2, 3))], 2, 0)
    places = list(mixture.every())
    assert mixture.sample(places[2]).observation.task == "late"
    for place in (places[1], places[6]):
        with refused("no_subtask", kind=DataError):
            mixture.sample(place)
    for episodes in ((0, 2), (1, 3)):
        with refused("no_subtask", f"episode {episodes[1]}, frame 0", kind=DataError):
            made_dataset(dataset, tmp_path, prompt="subtask", episodes=episodes)


def test_frames_without_a_subtask_do_not_matter_if_they_are_not_chosen(dataset, tmp_path) -> None:
    annotate(dataset, SPOKEN)
    chosen = {"prompt": "subtask", "frame_weights": "intervention", "episodes": (0, 1, 2)}  # from each frame 2 on
    assert len(list(Mixture([source(dataset, **chosen)], 2, 0).every())) == sum(int(MARKED[k].sum()) for k in (0, 1, 2))
    made_dataset(dataset, tmp_path, **chosen)


@pytest.mark.parametrize("spoken", [[(0.0, "a"), (0.0, "b")], [(0.0, None)], [(0.0, "  ")], [(float("nan"), "a")]])
def test_damaged_subtasks_are_refused(dataset, tmp_path, spoken) -> None:
    annotate(dataset, SPOKEN | {0: spoken})
    mixture = Mixture([source(dataset, prompt="subtask")], 2, 0)
    with refused("invalid_subtask", kind=DataError):
        mixture.sample(mixture.nth(0))
    assert mixture.sample(mixture.nth(LENGTHS[0])).observation.task == "push"
    with refused("invalid_subtask", kind=DataError):
        made_dataset(dataset, tmp_path, prompt="subtask", episodes=(0, 1))
    made_dataset(dataset, tmp_path, prompt="subtask", episodes=(1,))


def test_column_of_subtasks_that_holds_texts_is_refused(dataset) -> None:
    annotate(dataset, SPOKEN)
    for path in dataset.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        place = table.column_names.index("language_persistent")
        pq.write_table(table.set_column(place, "language_persistent", pa.array(["reach"] * len(table))), path)
    with refused("invalid_subtask", kind=DataError):
        source(dataset, prompt="subtask", episodes=(0,)).check_prompts()
    mixture = Mixture([source(dataset, prompt="subtask")], 2, 0)
    with refused("invalid_subtask", kind=DataError):
        mixture.sample(mixture.nth(0))


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        ({"tasks": ("fly",)}, "unknown_task"),
        ({"frame_weights": "note"}, "feature_not_numeric"),
        ({"frame_weights": "action"}, "feature_not_numeric"),
        ({"frame_weights": "interventions"}, "unknown_feature"),
        ({"prompt": "subtask"}, "unknown_feature"),
    ],
)
def test_choice_that_the_dataset_does_not_have_is_refused(dataset, choice, code) -> None:
    with refused(code, kind=ConfigurationError):
        source(dataset, **choice)


def test_empty_names_are_refused() -> None:
    for choice in ({"frame_weights": ""}, {"tasks": ()}):
        with refused("string_too_short" if "frame_weights" in choice else "too_short", kind=ValidationError):
            SourceSettings(path="data", tag="robot", **choice)


def test_statistics_count_all_frames_of_the_selected_episodes(dataset, tmp_path) -> None:
    settings = {"path": str(dataset), "tag": "robot", "episodes": (0, 2), "frame_weights": "intervention"}
    machine = make_machine(store=tmp_path / "store")
    sources = pinned(DatasetSettings.model_validate({"sources": [settings]}))
    chosen = run_stage("dataset", sources, {}, machine)
    measured = run_stage("quantile-stats", QuantileStatsSettings(features=("action",)), {"dataset": chosen}, machine)
    counts = [read_manifest(stage.path).rows["frames"] for stage in (chosen, measured)]
    assert counts == [MARKED[0].sum() + MARKED[2].sum(), 7 + 6]


def test_choice_of_no_frame_is_refused(dataset) -> None:
    with refused("no_frame_selected", kind=ConfigurationError):
        Mixture([source(dataset, tasks=("close",), frame_weights="intervention", episodes=(0,))], 2, 0)


def test_check_reads_the_dataset_of_a_robot_without_a_simulator(dataset, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text(
        'flow = "train-vla"\nextends = { file = "train-vla/own-robot-tiny", without = ["dataset.path"] }\n'
        '[[dataset.sources]]\npath = "marked"\ntag = "robot"\ncameras = {}\n'
    )
    load_recipe(file).values.check_stages({}, print)
    file.write_text(file.read_text() + 'tasks = ["fly"]\n')
    with refused("unknown_task", "fly", kind=ConfigurationError):
        load_recipe(file).values.check_stages({}, print)
