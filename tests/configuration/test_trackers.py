"""Trackers get what `history.jsonl` has. Each is read back from what its own library wrote to the disk."""

from __future__ import annotations

import io
import json
import math
import os
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.json_lines import History
from armature.components.configuration import stages, trackers
from armature.components.configuration.stages import TerminalEvents, run_stage
from armature.components.configuration.trackers import (
    TrackerRun,
    refuse_missing_trackers,
    tracker_places,
    with_trackers,
)
from armature.components.contracts.errors import ServerError
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.rollouts.table import write_rollouts
from tests.builders import make_machine, make_trajectory, make_turn
from tests.images import noise
from tests.refusals import refused

LAST = 5
RUN = ("train-vlm", "colors train-vlm")


def metrics_of(step: int) -> dict[str, float]:
    """Numbers that 32 bits would round, and those that are not finite."""
    return {"reward": step / 7, "timing/step": 1e-9 * step, "loss": math.nan if step == 2 else -step / 3}


class Counting(BaseModel):
    rate: float = 0.1
    sources: tuple[str, ...] = ("a", "b")


def train(
    root: Path, settings: Counting, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """Train steps 1 to LAST as the loops do: write the history, report metrics and rollouts.

    The first attempt dies after it wrote step 3 and before it reported it. The next one reports the steps again that
    the history has, as the training of robot policies does.
    """
    history, events = History(context.workspace / "history.jsonl"), context.events
    done = [int(row["step"]) for row in history.read()]
    for step in done:
        if step <= 2:
            events.metrics(metrics_of(step), step)
    for step in range(len(done), LAST + 1):
        events.progress("Training", step, LAST)
        for kind in ("evaluations", "rollouts") if step % 4 == 0 else ("rollouts",):
            events.artifact(
                Artifact(kind=kind, path=played(root / f"{kind}-{step}", context.images), digest=""), "output", step
            )
        history.append(step, metrics_of(step))
        if step == 3 and not done:
            raise ServerError("lost")
        events.metrics(metrics_of(step), step)
    return StageReport()


def prompt_of(group: int) -> str:
    return f"Which\nof {group} | {group + 1}?"


def played(folder: Path, images: Path) -> Path:
    """Write ten groups of two rollouts of two turns; the second turn sees both images."""
    folder.mkdir(parents=True)
    trajectories = []
    for group in range(10):
        refs = [ImageStore(images).put(encode_png(noise(number, 20, 10))) for number in (group, group + 100)]
        content = [{"type": "image", "sha256": refs[0].sha256}, {"type": "text", "text": prompt_of(group)}]
        messages = json.dumps([{"role": "user", "content": content}])
        turns = [
            make_turn(0.25, messages=messages, images=tuple(refs[:1]), completion=f"first {group}"),
            make_turn(0.5, index=1, images=tuple(refs), completion=f"second {group}"),
        ]
        trajectories += [
            make_trajectory(f"{group}-{member}", f"{group}", turns, task_id=f"t{group}") for member in "ab"
        ]
    write_rollouts(folder, GenerateOutputs(trajectories))
    return folder


# --- What each library wrote, read back ---


class TensorBoardFiles:
    """The event files, as TensorBoard reads them."""

    bits, line_break = np.float32, " "

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (home,) = (folder / "tensorboard/train-vlm").iterdir()
        self.name = home.name
        self.events = EventAccumulator(str(home), {"scalars": 0, "images": 0, "tensors": 0}).Reload()

    def curves(self) -> list[tuple[int, str, float]]:
        names = self.events.Tags()["scalars"]
        return [(each.step, name, each.value) for name in names for each in self.events.Scalars(name)]

    def settings(self) -> dict[str, Any]:
        (event,) = self.events.Tensors("settings/text_summary")
        return json.loads(event.tensor_proto.string_val[0].decode().removeprefix("```json").removesuffix("```"))

    def tables(self) -> dict[tuple[str, int], list[dict[str, Any]]]:
        found = {}
        for tag in self.events.Tags()["tensors"]:
            table = tag.removesuffix("/text_summary")
            for event in self.events.Tensors(tag) if table != "settings" else ():
                lines = event.tensor_proto.string_val[0].decode().replace("\\|", "¦").splitlines()
                cells = [[cell.strip().replace("¦", "|") for cell in line.split("|")[1:-1]] for line in lines]
                rows = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
                for row in rows:
                    row["reward"] = float(row["reward"])
                    row["images"] = [self._image(f"{table}/{row['rollout']}/{n}", event.step) for n in range(2)]
                found[table, event.step] = rows
        return found

    def _image(self, tag: str, step: int) -> np.ndarray:
        (image,) = [each for each in self.events.Images(tag) if each.step == step]
        return np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB"))


class TrackioDatabase:
    """Trackio's database in SQLite, which its dashboard reads, and its folder of media."""

    bits, line_break = float, "\n"

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.environ["TRACKIO_DIR"])
        (state,) = (folder / "store/workspaces").glob(f"*/{trackers.STATE}")
        with closing(sqlite3.connect(self.folder / "train-vlm.db")) as database:
            rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
            configs = dict(database.execute("SELECT run_name, config FROM configs").fetchall())
        (self.name,) = {name for name, _, _ in rows if json.loads(state.read_text())["id"] in name}
        self.rows = [(step, json.loads(metrics)) for name, step, metrics in rows if name == self.name]
        self.config = json.loads(configs[self.name])

    def curves(self) -> list[tuple[int, str, float]]:
        numbers = [(step, key, value) for step, row in self.rows for key, value in row.items()]
        return [(step, key, float(value)) for step, key, value in numbers if not isinstance(value, dict)]

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.config.items() if not name.startswith("_")}

    def tables(self) -> dict[tuple[str, int], list[dict[str, Any]]]:
        shown = [(step, key, value) for step, row in self.rows for key, value in row.items()]
        found = {(key, step): value["_value"] for step, key, value in shown if isinstance(value, dict)}
        for row in (row for rows in found.values() for row in rows):
            files = [self.folder / "media" / image["file_path"] for image in row["images"]]
            row["images"] = [np.asarray(Image.open(file).convert("RGB")) for file in files]
        return found


class WandbFolders:
    """The folders of offline runs, which `wandb sync` sends: all have the same run."""

    bits, line_break = float, "\n"

    def __init__(self, folder: Path) -> None:
        self.files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
        assert len({file.name for file in self.files}) == 1
        self.records = [record for file in self.files for record in wandb_records(file.read_bytes())]
        self.name = self.records_of("run")[0].display_name

    def records_of(self, kind: str) -> list[Any]:
        return [getattr(each, kind) for each in self.records if each.WhichOneof("record_type") == kind]

    def items(self) -> Iterator[tuple[int, str, list[str], Any]]:
        """Yield step, name, the keys within a table's description, and value."""
        for history in self.records_of("history"):
            for each in history.item:
                if not each.nested_key[0].startswith("_"):
                    yield history.step.num, each.nested_key[0], list(each.nested_key[1:]), json.loads(each.value_json)

    def curves(self) -> list[tuple[int, str, float]]:
        return [(step, name, float(value)) for step, name, within, value in self.items() if not within]

    def settings(self) -> dict[str, Any]:
        runs = self.records_of("run")
        config = [{each.key: json.loads(each.value_json) for each in run.config.update} for run in runs]
        assert config[0] == config[-1]
        return {name: value for name, value in config[0].items() if not name.startswith("_")}

    def tables(self) -> dict[tuple[str, int], list[dict[str, Any]]]:
        """Read the tables, with their images, from the artifacts to which the history refers."""
        artifacts = {each.client_id: each.manifest.contents for each in self.records_of("artifact")}
        found = {}
        for step, name, within, value in self.items():
            if within == ["artifact_path"]:
                client_id, _, path = value.removeprefix("wandb-client-artifact://").partition("/")
                files = {each.path: Path(each.local_path) for each in artifacts[client_id]}
                table = json.loads(files[path].read_text())
                rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
                for row in rows:
                    images = [files[row.pop(f"image {number}")["path"]] for number in range(2)]
                    row["images"] = [np.asarray(Image.open(file).convert("RGB")) for file in images]
                found[name, step] = rows
        return found


def wandb_records(content: bytes) -> Iterator[Any]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of 7 bytes, with Protocol Buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, whole = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield Record.FromString(whole)
            whole = b""


Reader = TensorBoardFiles | TrackioDatabase | WandbFolders
READERS: dict[str, type[Reader]] = {
    "tensorboard": TensorBoardFiles,
    "trackio": TrackioDatabase,
    "wandb": WandbFolders,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a training that died and was resumed, and that reported to all trackers that are installed here."""
    folder, installed = tmp_path_factory.mktemp("trackers"), tuple(filter(find_spec, READERS))
    if not installed:
        pytest.skip("no tracker is installed")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("TRACKIO_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(variable, str(folder / variable))  # Trackio reads its variable only once
        patch.setenv("WANDB_MODE", "offline")
        stage = Stage("train-vlm", 1, Counting, (), partial(train, folder / "played"))
        patch.setattr(stages, "STAGES", {"train-vlm": stage})
        machine = make_machine(store=folder / "store", report_to=installed)
        with refused("server_failed"):
            run_stage("train-vlm", Counting(), {}, machine, tracked_as=RUN)
        (path,) = (folder / "store/workspaces").glob(f"*/{trackers.STATE}")
        state = json.loads(path.read_text())
        assert state["sent"] == dict.fromkeys(installed, 2)
        # A killed process may have written a step to a tracker and not to this file, or the other way round.
        state["sent"] |= {name: step for name, step in (("tensorboard", 1), ("trackio", 3)) if name in installed}
        path.write_text(json.dumps(state))
        run_stage("train-vlm", Counting(), {}, machine, tracked_as=RUN)
        yield folder


@pytest.fixture(params=READERS)
def read(request: pytest.FixtureRequest) -> Reader:
    """What one tracker has."""
    pytest.importorskip(request.param)
    return READERS[request.param](request.getfixturevalue("home"))


def test_tracker_has_every_step_of_the_history_once_after_a_crash(read: Reader, home: Path) -> None:
    (history,) = (home / "store/workspaces").glob("*/history.jsonl")
    rows = {int(row.pop("step")): row for row in History(history).read()}
    assert list(rows) == list(range(LAST + 1))
    expected = [(step, key, read.bits(value)) for step, row in rows.items() for key, value in row.items()]
    order = itemgetter(0, 1)
    np.testing.assert_equal(sorted(read.curves(), key=order), sorted(expected, key=order))


def test_tracker_has_name_and_settings_of_the_stage(read: Reader) -> None:
    assert "colors train-vlm" in read.name
    assert read.settings() == {"stage": "train-vlm", "settings": {"rate": 0.1, "sources": ["a", "b"]}}


def test_tables_show_rollouts_of_each_evaluation_and_of_the_first_and_last_step(read: Reader) -> None:
    tables = read.tables()
    assert set(tables) == {("evaluations", 0), ("evaluations", 4), ("rollouts", 1), ("rollouts", 5)}
    for rows in tables.values():
        assert len(rows) == trackers.ROLLOUTS
        for group, row in enumerate(rows):
            images = [np.asarray(noise(seed, 20, 10)) for seed in (group, group + 100)]
            np.testing.assert_equal(row.pop("images"), images)
            assert row == {
                "rollout": f"{group}-a",
                "task": f"t{group}",
                "prompt": prompt_of(group).replace("\n", read.line_break),
                "answer": f"first {group} / second {group}",
                "reward": 0.75,
            }


def test_places_of_runs_are_kept_with_the_stage(home: Path) -> None:
    (workspace,) = (home / "store/workspaces").iterdir()
    places = tracker_places(workspace)
    assert set(places) == set(filter(find_spec, READERS))
    assert all(str(home) in place for tracker, place in places.items() if tracker != "trackio")


class Unreliable:
    """A tracker of somebody else that cannot take step 2 before step 3 is there."""

    place = "nowhere"
    taken: list[int]
    attempts = 0

    def __init__(self, run: TrackerRun, run_id: str, sent: int | None) -> None:
        self.sent = sent
        type(self).taken = []

    def log(self, values: Mapping[str, float], step: int, tables: trackers.Tables) -> None:
        type(self).attempts += step == 2
        if step == 2 and self.attempts < 2:
            raise OSError("connection lost")
        self.taken.append(step)

    def close(self, failed: bool) -> None: ...


class Unopened(Unreliable):
    """A tracker whose server is away."""

    def __init__(self, run: TrackerRun, run_id: str, sent: int | None) -> None:
        type(self).attempts += 1
        raise OSError("no route")


class Lines(TerminalEvents):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def lines_of(
    kind: type[Unreliable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fingerprint: str = "f" * 20
) -> list[str]:
    """Report three steps to a tracker, and return the lines that a user reads."""
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", kind)
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    monkeypatch.setattr(kind, "attempts", 0)
    run = TrackerRun("project", "run", fingerprint, {}, tmp_path, tmp_path, tmp_path)
    lines = Lines()
    with with_trackers(lines, ("tensorboard",), run) as events:
        for step in (1, 2, 3):
            events.metrics({"loss": 1.0}, step)
    return lines.lines


def test_tracker_that_fails_in_a_step_gets_it_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warning, place = lines_of(Unreliable, tmp_path, monkeypatch)
    assert "connection lost" in warning and "nowhere" in place
    assert Unreliable.taken == [1, 2, 3]


def test_another_training_in_the_same_folder_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines_of(Unreliable, tmp_path, monkeypatch)
    assert lines_of(Unreliable, tmp_path, monkeypatch)[1:] == []
    assert Unreliable.taken == []
    lines_of(Unreliable, tmp_path, monkeypatch, fingerprint="e" * 20)
    assert Unreliable.taken == [1, 2, 3]


def test_tracker_that_cannot_be_opened_is_counted_and_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning, lacks = lines_of(Unopened, tmp_path, monkeypatch)
    assert "no route" in warning and " 3 " in lacks
    assert Unopened.attempts == 1


def test_rejects_unknown_tracker_and_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("unknown_tracker", "machine.report_to", "tensorboard"):
        refuse_missing_trackers(["tensorbord"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with refused("package_missing", "report_to=", "armature-vla[tensorboard]"):
        refuse_missing_trackers(["tensorboard"], "report_to=")
    with refused("literal_error"):
        make_machine(report_to=("mlflow",))
    assert make_machine(report_to="wandb").report_to == ("wandb",)


def test_rejects_weights_and_biases_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with refused("tracker_key_missing", "machine.report_to", "WANDB_API_KEY"):
        refuse_missing_trackers(["wandb"])
