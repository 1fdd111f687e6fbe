"""Trackers get what `history.jsonl` has. Each is read back from what its own library wrote to the disk."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
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
from armature.components.configuration.trackers import TrackerRun, refuse_missing_trackers, with_trackers
from armature.components.contracts.errors import ServerError
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.rollouts.table import write_rollouts
from tests.builders import make_machine, make_trajectory, make_turn
from tests.images import noise
from tests.refusals import refused

LAST = 5
RUN = ("train-vlm", "colors train-vlm")
Curves = dict[int, dict[str, float]]


def metrics_of(step: int) -> dict[str, float]:
    """Numbers that 32 bits would round, and those that are not finite."""
    return {"reward": step / 7, "timing/step": 1e-9 * step, "loss": math.nan if step == 2 else -step / 3}


class Counting(BaseModel):
    rate: float = 0.1
    sources: tuple[str, ...] = ("a", "b")


def train(settings: Counting, inputs: Mapping[str, Artifact], folder: Path, context: StageContext) -> StageReport:
    """Train steps 1 to LAST as the loops do: write the history, report metrics and rollouts.

    The first attempt dies after it wrote step 3 and before it reported it. The next one reports the steps again that
    the history has, as the training of robot policies does.
    """
    history, events, (root,) = History(context.workspace / "history.jsonl"), context.events, ROOT
    done = [int(row["step"]) for row in history.read()]
    for step in done:
        if step <= 2:
            events.metrics(metrics_of(step), step)
    for step in range(len(done), LAST + 1):
        events.progress("Training", step, LAST)
        for kind in ("evaluations", "rollouts") if step % 2 == 0 else ("rollouts",):
            events.artifact(
                Artifact(kind=kind, path=played(root / f"{kind}-{step}", context.images), digest=""), "output", step
            )
        history.append(step, metrics_of(step))
        if step == 3 and not done:
            raise ServerError("lost")
        events.metrics(metrics_of(step), step)
    return StageReport()


ROOT: list[Path] = []


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

    bits = np.float32

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
                for number, row in enumerate(rows):
                    row["reward"] = float(row["reward"])
                    row["images"] = [self._image(f"{table}/{number}-{place}", event.step) for place in range(2)]
                found[table, event.step] = rows
        return found

    def _image(self, tag: str, step: int) -> np.ndarray:
        (image,) = [each for each in self.events.Images(tag) if each.step == step]
        return np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB"))


READERS: dict[str, Callable[[Path], Any]] = {"tensorboard": TensorBoardFiles}


@pytest.fixture(params=READERS)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def machine(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(stages, "STAGES", {"train-vlm": Stage("train-vlm", 1, Counting, (), train)})
    ROOT[:] = [tmp_path / "played"]
    return make_machine(store=tmp_path / "home/store", report_to=(name,))


def crash_and_resume(machine: Machine) -> None:
    with refused("server_failed"):
        run_stage("train-vlm", Counting(), {}, machine, tracked_as=RUN)
    for left in ROOT[0].iterdir():
        left.rename(left.with_name(f"first-{left.name}"))
    run_stage("train-vlm", Counting(), {}, machine, tracked_as=RUN)


def test_tracker_has_every_step_of_the_history_once_after_a_crash(machine: Machine, name: str, tmp_path: Path) -> None:
    crash_and_resume(machine)
    read = READERS[name](tmp_path / "home")
    (history,) = (tmp_path / "home/store/workspaces").glob("*/history.jsonl")
    rows = [(int(row.pop("step")), row) for row in History(history).read()]
    expected = [(step, key, read.bits(value)) for step, row in rows for key, value in row.items()]
    assert [step for step, _ in rows] == list(range(LAST + 1))
    np.testing.assert_equal(
        sorted(read.curves(), key=lambda each: each[:2]), sorted(expected, key=lambda each: each[:2])
    )
    assert "colors train-vlm" in read.name
    assert read.settings() == {"stage": "train-vlm", "settings": {"rate": 0.1, "sources": ["a", "b"]}}


def test_tables_show_rollouts_of_each_evaluation_and_of_the_first_and_last_step(
    machine: Machine, name: str, tmp_path: Path
) -> None:
    crash_and_resume(machine)
    tables = READERS[name](tmp_path / "home").tables()
    assert set(tables) == {("evaluations", 0), ("evaluations", 2), ("evaluations", 4), ("rollouts", 1), ("rollouts", 5)}
    for rows in tables.values():
        assert len(rows) == trackers.ROLLOUTS
        for group, row in enumerate(rows):
            np.testing.assert_equal(
                row.pop("images"), [np.asarray(noise(seed, 20, 10)) for seed in (group, group + 100)]
            )
            assert row == {
                "rollout": f"{group}-a",
                "task": f"t{group}",
                "prompt": prompt_of(group) if name != "tensorboard" else prompt_of(group).replace("\n", " "),
                "answer": f"first {group} / second {group}",
                "reward": 0.75,
            }


class Unreliable:
    """A tracker of somebody else that cannot take step 2 before step 3 is there."""

    place = "nowhere"
    taken: list[int]
    attempts = 0

    def __init__(self, run: TrackerRun, run_id: str, sent: int | None) -> None:
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


def lines_of(kind: type[Unreliable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Report three steps to a tracker, and return the lines that a user reads."""
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", kind)
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    monkeypatch.setattr(kind, "attempts", 0)
    run = TrackerRun("project", "run", "f" * 20, {}, tmp_path, tmp_path, tmp_path)
    lines = Lines()
    with with_trackers(lines, ("tensorboard",), run) as events:
        for step in (1, 2, 3):
            events.metrics({"loss": 1.0}, step)
    return lines.lines


def test_tracker_that_fails_in_a_step_gets_it_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warning, place = lines_of(Unreliable, tmp_path, monkeypatch)
    assert "connection lost" in warning and "nowhere" in place
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
