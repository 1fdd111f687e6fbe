"""Whatever is not a regular file is refused by name in every place that opens a file of the user's, without waiting."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from pydantic import ValidationError

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import MANIFEST, read_manifest
from armature.components.artifacts.tables import read_table
from armature.components.artifacts.tensors import INDEX, open_tensors, shard_names
from armature.components.configuration import load_recipe
from armature.components.contracts.errors import ArmatureError
from armature.components.contracts.files import regular
from armature.components.contracts.images import ImageRef
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import ENVIRONMENT, TASKS, read_environment
from armature.components.inference.command import read_config
from armature.components.machine.project import project
from armature.components.rewards.make import make_rewards
from armature.components.rewards.reward import RewardSettings
from armature.components.robots.datasets.lerobot.layout import read_info
from armature.components.robots.policies.molmoact2.processing.action_tokens import CONFIG, ActionTokens
from armature.components.robots.policies.norm_stats import NormStats
from armature.components.robots.policies.source import read_json


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket has at most 108 bytes
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(f"{path}-pipe"), path.symlink_to(f"{path}-pipe"))[1],
    "socket": make_socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}


def table(path: Path) -> None:
    split = {"by": "hash", "heldout": 0.5}
    args = {"source": path.name, "prompt": "{q}", "answer": "a", "rewards": [{"name": "exact_match"}], "split": split}
    with project(path.parent):
        make_environment(EnvironmentSettings.model_validate({"name": "dataset", "args": args})).tasks("train")


def tables_by_pattern(path: Path) -> None:
    (path.parent / "other.csv").write_text("q,a\n" + "x,y\n" * 8)
    table(path.with_name("*.csv"))


def schema_of_reward(path: Path) -> None:
    settings = RewardSettings.model_validate({"name": "json_schema", "file": path.name})
    make_rewards([settings], folder=path.parent, processes=1).close()


def image_store(path: Path) -> None:
    ref = ImageRef("a" * 64, "image/png", 1, 1)
    store = ImageStore(path.parent / "images")
    store.path(ref).parent.mkdir(parents=True)
    path.rename(store.path(ref))
    store.read(ref)


DOORS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "recipe": ("recipe.toml", load_recipe),
    "JSON Lines": ("rows.jsonl", table),
    "JSON": ("rows.json", table),
    "CSV": ("rows.csv", table),
    "Parquet": ("rows.parquet", table),
    "CSV by a pattern": ("rows.csv", tables_by_pattern),
    "schema": ("schema.json", schema_of_reward),
    "weights": ("model.safetensors", open_tensors),
    "index of weights": (INDEX, shard_names),
    "configuration": ("config.json", lambda path: read_config(path.parent)),
    "statistics": ("norm_stats.json", NormStats.load),
    "action tokens": (CONFIG, lambda path: ActionTokens.load(path.parent)),
    "policy": ("policy.json", read_json),
    "dataset": ("info.json", read_info),
    "table": ("train.parquet", lambda path: read_table(path, TASKS)),
    "manifest": (MANIFEST, lambda path: read_manifest(path.parent)),
    "environment": (ENVIRONMENT, lambda path: read_environment(path.parent)),
    "stored image": ("image.png", image_store),
}


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it waits for the file")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_rejects_irregular_files(tmp_path, door, kind):
    name, opened = DOORS[door]
    if (door, kind) == ("CSV by a pattern", "folder"):
        pytest.skip("a pattern means files")
    if door == "stored image" and kind.startswith("link"):
        pytest.skip("it is moved")
    KINDS[kind](tmp_path / name)
    with pytest.raises((ArmatureError, ValidationError)) as raised:
        opened(tmp_path / name)
    assert str(tmp_path) in str(raised.value) or name in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_irregular_files_have_different_errors(tmp_path, kind):
    KINDS[kind](tmp_path / "file")
    with pytest.raises(OSError) as raised:
        regular(tmp_path / "file")
    assert isinstance(raised.value, FileNotFoundError) == (kind == "link to nothing")
    (tmp_path / "real").write_text("")
    (tmp_path / "link").symlink_to("real")
    assert regular(tmp_path / "link").read_text() == ""
