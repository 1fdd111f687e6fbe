"""Statistics stage: results are reused for the same content, correct for each feature, and written atomically."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import astuple

import numpy as np
import pandas as pd
import psutil
import pytest

from armature.components.artifacts.cache import DownloadCache
from armature.components.configuration.stages import run_stage
from armature.components.contracts.machine import Machine
from armature.components.machine.workers.channel import decoded, encoded
from armature.components.robots.datasets.lerobot.layout import LocalFiles
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.measure import as_data, from_data, measure_dataset, measure_unit, plan
from armature.components.robots.datasets.remote import same_files
from armature.components.robots.datasets.settings import DatasetSettings, QuantileStatsSettings
from armature.components.robots.datasets.source import open_sources, pinned
from armature.components.robots.datasets.stage import augment
from benchmarks.large_dataset import write_dataset
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import LENGTHS, edit_cell, write

SETTINGS = QuantileStatsSettings(features=("action", "observation.images.front"), images="all")
EVERYTHING = QuantileStatsSettings(features=(), images="all")


DATA = "data/chunk-000/file-000.parquet"


INFINITE = np.array([0, 0, np.inf, 0, 0, 0, 0], np.float32)


def run(root, store, settings=SETTINGS, **machine):
    facts = make_machine(store=store, **machine)
    source = run_stage("dataset", pinned(DatasetSettings(path=str(root))), {}, facts)
    return run_stage("quantile-stats", settings, {"dataset": source}, facts)


def test_statistics_cover_every_feature(written, tmp_path):
    root, episodes = written
    artifact = run(root, tmp_path, EVERYTHING)
    stats = json.loads((artifact.path / "stats.json").read_text())
    assert list(stats) == list(open_dataset(root).info.features)
    for name in ("observation.state", "action", "next.reward"):
        values = np.concatenate([frames[name].reshape(len(frames[name]), -1) for frames in episodes]).astype(float)
        for key, level in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
            assert stats[name][key] == np.quantile(values, level, axis=0).tolist()
        np.testing.assert_allclose(stats[name]["std"], values.std(0), rtol=1e-12)
        assert stats[name]["count"] == [sum(LENGTHS)]
    pixels = np.concatenate([frames["observation.images.front"] for frames in episodes]).reshape(-1, 3) / 255
    assert np.ravel(stats["observation.images.front"]["q99"]).tolist() == np.quantile(pixels, 0.99, axis=0).tolist()
    wrist = np.concatenate([frames["observation.images.wrist"] for frames in episodes]) / 255
    np.testing.assert_allclose(np.ravel(stats["observation.images.wrist"]["mean"]), wrist.mean((0, 1, 2)), atol=0.01)
    each = pd.read_parquet(artifact.path / "episodes.parquet")
    assert each["episode_index"].tolist() == [0, 1, 2]
    expected = np.quantile(episodes[2]["action"].astype(float), 0.9, axis=0)
    assert each.loc[2, "stats/action/q90"].tolist() == expected.tolist()
    page = (artifact.path / "report.html").read_text()
    assert "observation.state[7]" in page and page.count('"axis":"value"') >= len(stats)


def test_written_dataset_already_has_the_same_statistics(written, tmp_path):
    measured = json.loads((run(written[0], tmp_path).path / "stats.json").read_text())
    stored = open_dataset(written[0]).stats
    for name, entry in measured.items():
        for key, value in entry.items():
            np.testing.assert_allclose(stored[name][key], value, rtol=1e-14, atol=1e-16)


def test_selected_features_are_measured_without_opening_images(copied, tmp_path):
    for path in copied.glob("videos/*/*/*.mp4"):
        path.write_bytes(b"")
    artifact = run(copied, tmp_path, QuantileStatsSettings(features=("action",), images="sampled"))
    assert list(json.loads((artifact.path / "stats.json").read_text())) == ["action"]
    with refused("unknown_feature", "actions"):
        run(copied, tmp_path, QuantileStatsSettings(features=("actions",), images="sampled"))


def test_statistics_are_cached_by_content(copied, tmp_path):
    first = run(copied, tmp_path)
    assert run(copied, tmp_path).path == first.path
    augment(copied, first.path)
    assert run(copied, tmp_path).path == first.path  # its own statistics are not part of what is measured
    edit_cell(copied / DATA, 3, "action", np.full(7, 50, np.float32))
    again = run(copied, tmp_path)
    assert again.path != first.path
    assert json.loads((again.path / "stats.json").read_text())["action"]["max"] == [50.0] * 7


def test_rejects_dataset_changed_after_it_was_referenced(copied, tmp_path):
    facts = make_machine(store=tmp_path)
    named = pinned(DatasetSettings(path=str(copied)))
    source = run_stage("dataset", named, {}, facts)
    with (copied / "meta/info.json").open("a") as file:
        file.write("\n")
    with refused("dataset_changed", copied):
        run_stage("quantile-stats", SETTINGS, {"dataset": source}, facts)
    with refused("dataset_digest_mismatch", copied, named.digest):
        pinned(named)


def test_quick_digest_reads_no_data_and_is_recorded(copied, tmp_path):
    facts = make_machine(store=tmp_path / "store")
    settings = pinned(DatasetSettings(path=str(copied), digest="quick"))
    assert settings.digest == f"quick:{LocalFiles(copied).quick_digest()}" and pinned(settings) == settings
    source = run_stage("dataset", settings, {}, facts)
    (recorded,) = json.loads((source.path / "dataset.json").read_text())["sources"]
    assert recorded["digest"] == settings.digest
    data = copied / DATA
    state, content = data.stat(), data.read_bytes()
    data.write_bytes(bytes(len(content)))  # no one reads it
    os.utime(data, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert open_sources(source.path)[0].dataset.info.total_episodes == 3
    os.utime(data)
    with refused("dataset_changed", copied):
        open_sources(source.path)
    os.utime(data, ns=(state.st_atime_ns, state.st_mtime_ns))
    with (copied / "meta/tasks.parquet").open("r+b") as file:  # what it does read
        file.write(b"PAR2")
    with refused("dataset_changed", copied):
        open_sources(source.path)


def test_dataset_name_does_not_change_the_digest(written, copied):
    assert LocalFiles(written[0]).digest() == LocalFiles(copied).digest()
    with refused("not_a_lerobot_dataset", copied / "meta"):
        LocalFiles(copied / "meta").digest()


def test_four_workers_give_the_same_bytes_as_threads(tmp_path):
    write(tmp_path / "files", data_files_size_in_mb=1e-3)
    threads = run(tmp_path / "files", tmp_path / "threads", EVERYTHING, threads=2)
    workers = run(tmp_path / "files", tmp_path / "workers", EVERYTHING, workers__statistics=4)
    assert workers.digest == threads.digest


def test_worker_errors_are_named_and_changed_files_refused(copied):
    dataset = open_dataset(copied)
    path = copied / DATA
    edit_cell(path, 9, "action", INFINITE)
    units = plan(dataset, QuantileStatsSettings(features=("action",)), range(3))
    with refused("feature_not_finite", "action", "episode 2, frame 1"):
        measure_dataset(dataset, units, make_machine(workers__statistics=1), lambda done: None)
    before = LocalFiles(copied).quick_digest()
    os.utime(path, (1, 1))
    with refused("node_files_differ", copied):
        same_files(str(copied), before, DownloadCache.standard())


def test_unit_of_a_killed_worker_is_measured_again(tmp_path):
    write_dataset(tmp_path / "files", 12_000, video_files=12)
    dataset = open_dataset(tmp_path / "files")
    units = plan(dataset, QuantileStatsSettings(features=("action",)), range(12_000))
    progress = []

    def kill(done):
        progress.append(done)
        for each in psutil.Process().children(recursive=True) if done == 1 else ():
            with suppress(psutil.Error):  # its guard, or what it guarded, has ended by itself
                if "armature.components.robots.datasets.worker" in each.cmdline():
                    each.kill()
                    progress.append("killed")

    measured = measure_dataset(dataset, units, make_machine(workers__statistics=1), kill)
    assert "killed" in progress and [done for done in progress if done != "killed"] == list(range(1, 13))
    assert measured.episodes.equals(measure_dataset(dataset, units, Machine(), lambda done: None).episodes)


def test_unit_is_sent_as_numbers(written):
    dataset = open_dataset(written[0])
    (unit,) = plan(dataset, QuantileStatsSettings(features=("action",)), range(3))
    assert len(encoded(["measure", astuple(unit)])) < 100
    measured = measure_unit(unit, dataset)
    again = from_data(decoded(encoded(as_data(measured))))
    assert again.episodes.equals(measured.episodes)
    for name, values in measured.values.items():
        np.testing.assert_array_equal(again.values[name].parts[0], values.parts[0])
        assert again.values[name].mean.tolist() == values.mean.tolist()


def test_non_finite_value_error_names_the_feature(copied, tmp_path):
    edit_cell(copied / DATA, 9, "action", INFINITE)
    with refused("feature_not_finite", "action", 2) as caught:
        run(copied, tmp_path)
    assert caught.value.where == "episode 2, frame 1"


def test_augment_keeps_unmeasured_statistics(copied, tmp_path):
    before = open_dataset(copied).stats
    artifact = run(copied, tmp_path, QuantileStatsSettings(features=("action",), images="sampled"))
    (copied / "meta/stats.json").write_text(json.dumps({**before, "action": {"mean": [0.0]}, "custom": {"max": [1]}}))
    augment(copied, artifact.path)
    after = open_dataset(copied).stats
    assert after["custom"] == {"max": [1]} and after["observation.state"] == before["observation.state"]
    assert after["action"]["q99"] == before["action"]["q99"]
    assert sorted(path.name for path in (copied / "meta").iterdir()) == sorted(
        ["episodes", "info.json", "stats.json", "tasks.parquet"]
    )


_KILLED = """
import os, signal, sys
from pathlib import Path
from armature.components.robots.datasets import stage

step, root, statistics = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if step == "write":
    os.fsync = die
else:
    Path.rename = die
stage.augment(root, statistics)
"""


@pytest.mark.parametrize("step", ["write", "rename"])
def test_crash_while_augmenting_keeps_old_statistics(copied, tmp_path, step):
    (tmp_path / "stats.json").write_text('{"action": {"mean": [1.0]}}')
    before = (copied / "meta/stats.json").read_bytes()
    command = [sys.executable, "-c", _KILLED, step, str(copied), str(tmp_path)]
    assert subprocess.run(command, check=False, env={**os.environ}).returncode == -signal.SIGKILL
    assert (copied / "meta/stats.json").read_bytes() == before
    augment(copied, tmp_path)
    assert open_dataset(copied).stats["action"] == {"mean": [1.0]}


def test_reference_uses_the_original_of_a_dvc_copy(copied, tmp_path, monkeypatch):
    copy = tmp_path / ".dvc/tmp/exps/standalone/tmp1"
    shutil.copytree(copied, copy / "copy")
    for root in (tmp_path, copy):
        (root / ".git").mkdir()
    with monkeypatch.context() as within:
        within.setenv("DVC_ROOT", str(tmp_path))
        within.chdir(copy)
        first = run_stage("dataset", pinned(DatasetSettings(path="copy")), {}, Machine())
    shutil.rmtree(copy)
    monkeypatch.chdir(tmp_path)
    assert run_stage("dataset", pinned(DatasetSettings(path="copy")), {}, Machine()).path == first.path
    (source,) = open_sources(first.path)
    assert str(source.dataset.files) == str(copied)
