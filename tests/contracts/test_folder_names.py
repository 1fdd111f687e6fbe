"""Every path of the project is taken as it is: no character in it makes it a pattern, an address or an option."""

from __future__ import annotations

import asyncio
import glob
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sqlalchemy import create_engine, make_url, text

from armature.components.artifacts.cache import DownloadCache
from armature.components.artifacts.tables import read_table, write_table
from armature.components.configuration import load_recipe
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.environments.dataset.files import matches
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import TASKS
from armature.components.machine.private_files import sqlite_url
from armature.components.machine.project import project
from armature.components.models.source import locate
from armature.components.robots.datasets.lerobot.frames import FrameReader
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.lerobot.video import VideoSettings
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.remote import open_files
from armature.components.robots.datasets.settings import LayoutSettings
from armature.verify import verify
from tests.hostile_names import EVERY_CHARACTER, HOSTILE_NAMES
from tests.refusals import refused

NAMES = (*HOSTILE_NAMES, EVERY_CHARACTER)


def rows(where: str) -> str:
    return "q,a\n" + "".join(f"{where} {number},y\n" for number in range(8))


@pytest.fixture
def named(request, tmp_path) -> Path:
    """A folder with the tested name. Beside it are folders that the name would match if it were read as a pattern, such
    as * or [v]."""
    for name in ("v", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.csv").write_text(rows("beside"))
    folder = tmp_path / request.param
    folder.mkdir()
    return folder


def prompts(folder: Path | None, source: str, **changes: object) -> set[str]:
    """Return the first word of each question in a dataset environment that reads `source`."""
    split = {"by": "hash", "heldout": 0.5}
    args = {"source": source, "prompt": "{q}", "answer": "a", "rewards": [{"name": "exact_match"}], "split": split}
    settings = EnvironmentSettings.model_validate({"name": "dataset", "args": args | changes})
    with project(folder), closing(make_environment(settings, processes=1)) as environment:
        return {asked(environment, task).partition(" ")[0] for task in environment.tasks("train")}


def asked(environment: Environment, task: Task) -> str:
    observation = asyncio.run(environment.episode(task).reset())
    return "".join(part for part in observation.content if isinstance(part, str))


@pytest.mark.parametrize("named", NAMES, indirect=True)
def test_folder_name_may_contain_table_patterns(named, monkeypatch):
    (named / "rows.csv").write_text(rows("here"))
    sources = [("rows.csv", named), ("*.csv", named), (str(named / "rows.csv"), None), (str(named / "*.csv"), None)]
    sources += [(f"{named.name}/rows.csv", named.parent), (f"{named.name}/*.csv", named.parent), (".", named)]
    sources += [(f"file://{named}/rows.csv", None), (f"file://{named}/*.csv", None)]
    assert [(source, prompts(folder, source)) for source, folder in sources] == [
        (each, {"here"}) for each, _ in sources
    ]
    monkeypatch.chdir(named.parent)
    assert prompts(None, f"{named.name}/rows.csv") == {"here"} == prompts(None, f"{named.name}/*.csv")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(".")])
def test_table_and_images_may_have_any_name(tmp_path, name):
    (tmp_path / "other.jsonl").write_text('{"q": "beside", "a": "y", "i": "x.png"}\n')
    Image.new("RGB", (32, 32)).save(tmp_path / f"{name}.png")
    written = [{"q": f"here {number}", "a": "y", "i": f"{name}.png"} for number in range(8)]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    assert prompts(tmp_path, f"{name}.jsonl", images=["i"]) == {"here"}
    of = {"by": "name", "train": [f"{name}.jsonl"], "heldout": ["other.jsonl"]}
    assert prompts(tmp_path, ".", format="jsonl", split=of) == {"here"}


NAME = st.text(st.sampled_from("ab[]*?!-{}. "), min_size=1, max_size=5).filter(lambda name: name.strip("."))


@given(st.lists(st.lists(NAME, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6, unique=True), st.data())
def test_existing_name_wins_over_a_pattern(names, data):
    wanted = data.draw(st.sampled_from(names))
    assert matches(wanted, names) == [wanted]
    folder = wanted.rpartition("/")[0]
    inside = [name for name in names if name.rpartition("/")[0] == folder]
    if folder:
        assert matches(f"{folder}/*", names) == inside
    assert matches(glob.escape(wanted), names)[:1] in ([wanted], matches(glob.escape(wanted), [wanted]), [])


@pytest.mark.parametrize("pattern", ["a**", "x/**y/z"])
def test_rejects_invalid_pattern(pattern):
    with pytest.raises(ConfigurationError):
        matches(pattern, ["a"])


@pytest.mark.parametrize("named", NAMES, indirect=True)
def test_recipe_and_store_may_have_any_name(named, monkeypatch):
    file = named / f"{named.name}.toml"
    file.write_text('extends = "train-vlm/colors"\nflow = "train-vlm"\n')
    monkeypatch.chdir(named.parent)
    for store in (named.name, str(named)):
        recipe = load_recipe(Path(named.name) / file.name, [f"machine.store={store}"])
        machine = recipe.sections["machine"]
        assert isinstance(machine, Machine) and str(machine.store) == store
        assert recipe.folder is not None and recipe.folder.resolve() == named


@pytest.mark.parametrize("name", ["2024", "1e5", "0x10", "2024-05-01", "2024-05-01T10:00:00", "10:30:00", "1_000"])
def test_folder_name_may_be_a_toml_value(name):
    machine = load_recipe("train-vlm/colors", [f"machine.store={name}"]).sections["machine"]
    assert isinstance(machine, Machine) and str(machine.store) == name


@pytest.mark.parametrize("named", NAMES, indirect=True)
def test_sqlite_address_of_any_folder_name(named):
    url = sqlite_url(named / "a.db", "pysqlite")
    assert make_url(url).database == str(named / "a.db")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (a)"))
    engine.dispose()
    with closing(sqlite3.connect(named / "a.db")) as opened:
        assert opened.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert {path.name for path in named.parent.iterdir()} == {named.name, "v", "beside"}


@pytest.mark.parametrize("named", NAMES, indirect=True)
def test_relative_table_names(named, monkeypatch):
    monkeypatch.chdir(named.parent)
    path = Path(named.name, "train.parquet")
    written: list[dict[str, object]] = [{"task_id": "here", "split": "train", "payload": "{}"}]
    write_table(path, written, TASKS)
    assert [path.name for path in named.iterdir()] == ["train.parquet"]
    assert read_table(path, TASKS, {"task_id": "here"}).to_pylist() == written


@pytest.mark.parametrize("named", ["[v]", "a:b", "file:", "~", EVERY_CHARACTER], indirect=True)
def test_robot_dataset_is_read_from_a_folder_of_any_name(named, monkeypatch):
    monkeypatch.chdir(named.parent)
    root, camera = Path(named.name, "dataset"), "observation.images.camera"
    features = {
        "action": Feature(dtype="float32", shape=(1,), names=["x"]),
        camera: Feature(dtype="video", shape=(32, 32, 3), names=["height", "width", "channels"]),
    }
    layout = LayoutSettings(video=VideoSettings(codec="libx264", quality=5, keyframe_every=2))
    with create_dataset(root, fps=10, robot_type="toy", features=features, layout=layout) as writer:
        images = np.full((4, 32, 32, 3), 200, np.uint8)
        writer.add_episode({"action": np.zeros((4, 1), np.float32), camera: images}, "a task")
    reader = FrameReader(open_dataset(root), DownloadCache.standard())
    image = np.asarray(reader.image(camera, reader.dataset.episodes[0], 2))
    assert abs(float(image.mean()) - 200) < 10


@pytest.mark.parametrize("name", ["a" * 300, f"a/{'b' * 300}", "/".join(["c" * 200] * 30)])
def test_rejects_too_long_names(name, tmp_path):
    (tmp_path / "rows.csv").write_text(rows("here"))
    for source, changes in ((name, {}), (f"{name}.csv", {}), (f"{name}/*.csv", {}), ("rows.csv", {"root": name})):
        with pytest.raises(ArmatureError):
            prompts(tmp_path, source, **changes)
    for opened in (lambda: open_files(name, None, DownloadCache.standard()), lambda: locate(name)):
        with pytest.raises(ArmatureError):
            opened()
    with refused("store_missing"):
        verify(Path(name))


def test_rejects_unknown_url_schemes():
    with refused("url_not_supported"):
        open_files("zip://a::b", None, DownloadCache.standard())
