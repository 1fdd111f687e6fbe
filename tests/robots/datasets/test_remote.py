"""Datasets behind URLs and on a hub: the same items as from a folder, downloading only the files they need."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec
import numpy as np
import pytest

from armature.components.artifacts.cache import DownloadCache
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import run_stage
from armature.components.robots.datasets.lerobot.layout import LocalFiles
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.mixture import FrameIndex, Mixture
from armature.components.robots.datasets.remote import open_files
from armature.components.robots.datasets.settings import DatasetSettings, QuantileStatsSettings
from armature.components.robots.datasets.source import open_sources, pinned
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import write

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SPLIT = {"data_files_size_in_mb": 1e-3, "video_files_size_in_mb": 1e-9}


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Write a dataset with one data file and one video file per episode."""
    root = tmp_path_factory.mktemp("datasets") / "many"
    write(root, **SPLIT)
    return root


@pytest.fixture
def bucket(many, request) -> Iterator[str]:
    filesystem = fsspec.filesystem("memory")
    url = f"memory://{request.node.name.partition('[')[0]}/small"
    filesystem.put(str(many), url, recursive=True)
    yield url
    filesystem.rm(url, recursive=True)


@pytest.fixture
def cache(tmp_path):
    return DownloadCache(tmp_path / "cache", 10**9)


def fetched(root: Path) -> list[str]:
    names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(name for name in names if "/." not in f"/{name}")


def test_downloads_only_needed_files(bucket, many, cache):
    dataset = open_dataset(open_files(bucket, None, cache))
    assert fetched(dataset.root) == [
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/tasks.parquet",
    ]
    folder = open_dataset(many)
    (values,) = dataset.columns(["action"], dataset.episodes[2]).values()
    np.testing.assert_array_equal(values, folder.columns(["action"], folder.episodes[2])["action"])
    assert len(fetched(dataset.root)) == 3  # columns beside images are read where they lie
    assert len(list(dataset.images("observation.images.front", dataset.episodes[2], [0, 4]))) == 2
    assert "data/chunk-000/file-002.parquet" in fetched(dataset.root) and len(fetched(dataset.root)) == 4
    shown = list(dataset.images("observation.images.wrist", dataset.episodes[1], [0]))
    expected = list(folder.images("observation.images.wrist", folder.episodes[1], [0]))
    np.testing.assert_array_equal(np.asarray(shown[0]), np.asarray(expected[0]))
    assert "videos/observation.images.wrist/chunk-000/file-001.mp4" in fetched(dataset.root)
    assert dataset.stats == folder.stats


def test_stages_accept_a_url(bucket, many, tmp_path):
    facts = make_machine(store=tmp_path)
    settings = QuantileStatsSettings(features=("next.reward",), images="sampled")
    source = run_stage("dataset", pinned(DatasetSettings(path=bucket)), {}, facts)
    made = run_stage("quantile-stats", settings, {"dataset": source}, facts)
    stats = json.loads((made.path / "stats.json").read_text())
    assert stats["next.reward"]["q99"] == open_dataset(many).stats["next.reward"]["q99"]
    assert Mixture(open_sources(source.path), 3, 0).sample(FrameIndex(0, 9)).observation.task == "task 0"


def test_changed_bucket_is_refused_until_its_digest_is_updated(bucket, many, tmp_path):
    facts = make_machine(store=tmp_path)
    source = run_stage("dataset", pinned(DatasetSettings(path=bucket)), {}, facts)
    info = json.loads((many / "meta/info.json").read_text()) | {"robot_type": "other"}
    with fsspec.open(f"{bucket}/meta/info.json", "w") as file:
        json.dump(info, file)
    with refused("dataset_changed", bucket):
        open_sources(source.path)
    again = run_stage("dataset", pinned(DatasetSettings(path=bucket)), {}, facts)
    assert open_sources(again.path)[0].dataset.info.robot_type == "other"


def test_download_limit_of_a_dataset(bucket, many, tmp_path):
    meta = sum((many / name).stat().st_size for name in LocalFiles(many).names() if name.startswith("meta/"))
    dataset = open_dataset(open_files(bucket, None, DownloadCache(tmp_path, meta + 1000)))
    with refused("fetch_limit_exceeded", "ARMATURE_FETCH_LIMIT_GB"):
        list(dataset.images("observation.images.front", dataset.episodes[0], [0]))
    assert not list(dataset.root.rglob("data/*/*.parquet"))


def test_byte_ranges_are_read_without_downloading_files(bucket, many, tmp_path):
    meta = sum((many / name).stat().st_size for name in LocalFiles(many).names("meta"))
    dataset = open_dataset(open_files(bucket, None, DownloadCache(tmp_path, meta, ranges=True)))
    folder = open_dataset(many)
    for camera in ("observation.images.front", "observation.images.wrist"):
        actual, expected = (list(each.images(camera, each.episodes[2], [0, 4, 11])) for each in (dataset, folder))
        np.testing.assert_array_equal(np.stack(actual), np.stack(expected))
    assert fetched(dataset.root) == LocalFiles(many).names("meta")
    with fsspec.open(f"{bucket}/videos/observation.images.wrist/chunk-000/file-001.mp4", "wb") as file:
        file.write(b"short")
    with refused("remote_file_size_mismatch", "file-001.mp4", 5):
        list(dataset.images("observation.images.wrist", dataset.episodes[1], [0]))


def test_hub_samples_are_read_by_byte_ranges(hub, many, tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ARMATURE_FETCH", "ranges")
    monkeypatch.setenv("ARMATURE_FETCH_LIMIT_GB", "0.0001")
    artifact = run_stage(
        "dataset", pinned(DatasetSettings(path="someone/small", revision="v1")), {}, make_machine(store=tmp_path)
    )
    mixture = Mixture(open_sources(artifact.path), 3, 0)
    here = run_stage("dataset", pinned(DatasetSettings(path=str(many))), {}, make_machine(store=tmp_path))
    expected = Mixture(open_sources(here.path), 3, 0)
    for position in range(8):
        sample, other = mixture[position], expected[position]
        np.testing.assert_array_equal(sample.actions, other.actions)
        for camera, image in other.observation.images.items():
            np.testing.assert_array_equal(sample.observation.images[camera], image)
    assert fetched(mixture.sources[0].dataset.root) == LocalFiles(many).names("meta")
    monkeypatch.setenv("ARMATURE_FETCH", "all")
    with refused("invalid_fetch_mode", "ARMATURE_FETCH"):
        DownloadCache.standard()


def test_truncated_download_is_not_cached(bucket, cache):
    dataset, name = open_dataset(open_files(bucket, None, cache)), "data/chunk-000/file-000.parquet"
    with fsspec.open(f"{bucket}/{name}", "wb") as file:
        file.write(b"short")
    with refused("remote_file_size_mismatch", name, 5):
        list(dataset.images("observation.images.front", dataset.episodes[0], [0]))
    with refused("remote_file_size_mismatch", name, 5):
        dataset.columns(["action"], dataset.episodes[0])
    assert not list(dataset.root.rglob("data/*/*.parquet"))
    fsspec.filesystem("memory").rm(f"{bucket}/{name}")
    with refused("remote_file_gone", name):
        list(dataset.images("observation.images.front", dataset.episodes[0], [0]))
    with refused("remote_file_unreadable", name):
        dataset.columns(["action"], dataset.episodes[0])


def test_download_stops_at_the_listed_size(bucket, cache):
    dataset = open_dataset(open_files(bucket, None, cache))
    name = "data/chunk-000/file-000.parquet"
    with fsspec.open(f"{bucket}/{name}", "wb") as file:
        file.write(bytes(2**26))
    arrived = []
    callback = fsspec.Callback(hooks={"count": lambda size, value: arrived.append(value)})
    with refused("remote_file_size_mismatch", name):
        dataset.files.fetch(name, callback)
    assert max(arrived, default=0) < 2**26 and not list(dataset.root.rglob("data/*/*.parquet"))


@pytest.mark.parametrize(
    ("path", "revision", "code"),
    [
        ("memory://empty", None, "not_a_lerobot_dataset"),
        ("nowhere://bucket/dataset", None, "url_not_supported"),
        ("memory://empty", "main", "revision_unused"),
        ("someone/dataset", None, "revision_missing"),
    ],
)
def test_error_names_invalid_dataset_or_url(cache, path, revision, code):
    with refused(code, path):
        open_files(path, revision, cache)


@pytest.mark.parametrize("recipe", ["train-vla/own-robot-tiny", "quantile-stats/folder"])
@pytest.mark.parametrize(("path", "code"), [("./none", "not_a_lerobot_dataset"), ("data/none", "revision_missing")])
def test_missing_dataset_of_a_recipe_is_found_before_the_run(recipe, path, code):
    with refused(code, path):
        load_recipe(recipe, [f"dataset.path={path}"]).values.refuse_sources()


class Hub(BaseHTTPRequestHandler):
    """HTTP server with the four responses of a hub that a dataset needs, for one repository."""

    root: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        if path.startswith("/api/datasets/someone/small/revision/"):
            exists = path.rpartition("/")[2] in ("v1", COMMIT)
            return self.answer(200, {"id": "someone/small", "sha": COMMIT}) if exists else self.answer(404, {})
        if path.startswith(f"/api/datasets/someone/small/tree/{COMMIT}"):
            return self.answer(200, [self.entry(name) for name in fetched(self.root)])
        if path.startswith("/api/datasets/someone/small/paths-info/"):
            return self.answer(200, [])
        before, _, name = path.partition(f"/resolve/{COMMIT}/")
        if before == "/datasets/someone/small" and (self.root / name).is_file():
            return self.answer(200, (self.root / name).read_bytes())
        return self.answer(404, {})

    def entry(self, name: str) -> dict[str, object]:
        data = (self.root / name).read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def answer(self, status: int, content: object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            status, data = 206, data[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", hashlib.sha1(data).hexdigest())
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Suppress the server's log messages."""


@pytest.fixture
def hub(many, monkeypatch) -> Iterator[list[str]]:
    """Start the hub and return the list that records the requests it gets."""
    import huggingface_hub
    from huggingface_hub import constants

    Hub.root, Hub.asked = many, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    yield Hub.asked
    server.shutdown()
    server.server_close()


def test_hub_dataset_is_read_at_its_commit(hub, many, tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    settings = pinned(DatasetSettings(path="someone/small", revision="v1"))
    assert settings.revision == COMMIT and settings.digest
    artifact = run_stage("dataset", settings, {}, make_machine(store=tmp_path))
    (source,) = open_sources(artifact.path)
    folder = open_dataset(many)
    sample = Mixture((source,), 3, 0).sample(FrameIndex(0, 8))
    np.testing.assert_array_equal(sample.actions, folder.columns(["action"], folder.episodes[2])["action"][:3])
    np.testing.assert_array_equal(
        sample.observation.images["observation.images.front"],
        np.asarray(next(iter(folder.images("observation.images.front", folder.episodes[2], [0])))),
    )
    assert "data/chunk-000/file-002.parquet" in fetched(source.dataset.root)
    assert "data/chunk-000/file-000.parquet" not in fetched(source.dataset.root)
    hub.clear()
    assert open_sources(artifact.path)[0].dataset.episodes == source.dataset.episodes
    assert hub == []  # a commit never changes: what was fetched needs no network
    with refused("repository_unavailable", "someone/small", "v2"):
        pinned(DatasetSettings(path="someone/small", revision="v2"))


def test_existing_folder_takes_precedence_over_hub_name(many, tmp_path, monkeypatch):
    shutil.copytree(many, tmp_path / "someone/small")
    monkeypatch.chdir(tmp_path)
    files = open_files("someone/small", None, DownloadCache(tmp_path / "cache", 0))
    assert isinstance(files, LocalFiles) and files.digest() == LocalFiles(many).digest()
