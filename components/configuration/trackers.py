"""Report the metrics, settings and a few rollouts of a stage to TensorBoard, Trackio and Weights & Biases as it runs.

`machine.report_to` names the trackers. MLflow, to which flows report in any case, keeps the lineage.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.parquet as pq

from armature.components.artifacts.disk import write_file
from armature.components.artifacts.images import ImageStore, decode
from armature.components.artifacts.json_lines import History
from armature.components.contracts.errors import ConfigurationError, blanked
from armature.components.contracts.images import EncodedImage, ImageRef
from armature.components.contracts.installation import install_command
from armature.components.contracts.metrics import dump_json
from armature.components.contracts.stages import TRAINING, Artifact, Events
from armature.components.machine.registry import suggestion

STATE = "trackers.json"
"""File in a stage's workspace about its runs in trackers. It has the id of these runs, and for each tracker the last
step that was sent and the place where the run can be seen."""
ROLLOUTS, IMAGES = 8, 4
"""Maximum number of rollouts in a table, each from a different group, and maximum number of images per rollout."""
TEXTS = ("rollout", "task", "prompt", "answer", "reward")
"""Columns of a table of rollouts, besides the images."""


@dataclass(frozen=True)
class TrackerRun:
    """The names of a run in trackers, the settings that they show, and folders.

    folder: where trackers that write files keep them. workspace: the folder from which the run resumes; it has
    `history.jsonl`, if the run writes one. images: the root of the image store.
    """

    project: str
    name: str
    fingerprint: str
    settings: Mapping[str, Any]
    folder: Path
    workspace: Path
    images: Path


Tables = Mapping[str, Sequence[Mapping[str, Any]]]
"""The rollouts of each table, by the name of the table: the columns `TEXTS`, and `images`, a list of Pillow images."""


class Tracker(Protocol):
    """One run in a tracker.

    The constructor takes a `TrackerRun`, the run's id, and the last step that the tracker was sent in an earlier
    process.
    """

    place: str
    """URL of the run, or the command that shows it."""
    sent: int | None
    """Last step that the tracker had when the run was opened. If the tracker does not report this step, it is the last
    step that was sent to it."""

    def log(self, values: Mapping[str, float], step: int, tables: Tables) -> None:
        """Send the metrics and the tables of one step."""

    def close(self, failed: bool) -> None:
        """Finish the run and wait until everything is sent or written."""


class TensorBoard:
    """Event files in a folder for each run. TensorBoard keeps numbers as 32-bit floats."""

    def __init__(self, run: TrackerRun, run_id: str, sent: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" / run.project
        # After a crash the files may have a step that the state does not have: purge_step hides it.
        self._writer = SummaryWriter(f"{folder}/{run.name}-{run_id}", purge_step=None if sent is None else sent + 1)
        self.sent = sent
        self.place = f"tensorboard --logdir {folder}"
        if sent is None:
            self._writer.add_text("settings", f"```json\n{json.dumps(run.settings, indent=1, default=str)}\n```")

    def log(self, values: Mapping[str, float], step: int, tables: Tables) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for table, rollouts in tables.items():
            cells = [TEXTS, ["---"] * len(TEXTS), *([_cell(row[name]) for name in TEXTS] for row in rollouts)]
            self._writer.add_text(table, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)
            for row in rollouts:
                for number, image in enumerate(row["images"]):
                    pixels, tag = np.asarray(image), f"{table}/{row['rollout']}/{number}"
                    self._writer.add_image(tag, pixels, step, dataformats="HWC")
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def _cell(value: object) -> str:
    """Return the value as text that fits into one cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")


class Trackio:
    """A run in Trackio's local database, or on the server or Space that its environment variables name."""

    def __init__(self, run: TrackerRun, run_id: str, sent: int | None) -> None:
        import trackio

        name = f"{run.name} {run_id}"  # Trackio finds a run to resume by its name
        begin = partial(trackio.init, run.project, name=name, config=dict(run.settings), resume="allow", embed=False)
        # In a context of its own, the run is not the "current" one, which Trackio would finish when another begins.
        self._run = Context().run(begin, auto_log_cpu=False, auto_log_gpu=False)
        self.place = self._run.url or f"trackio show --project {run.project}"
        # Trackio writes twice a second, so a killed process may have sent more than the database has.
        self.sent = self._run._next_step - 1

    def log(self, values: Mapping[str, float], step: int, tables: Tables) -> None:
        from trackio import Image, Table

        shown = {
            name: Table(data=[{**row, "images": [*map(Image, row["images"])]} for row in rows])
            for name, rows in tables.items()
        }
        self._run.log({**values, **shown}, step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class WeightsAndBiases:
    """A run in Weights & Biases, or in a folder to send later with WANDB_MODE=offline."""

    def __init__(self, run: TrackerRun, run_id: str, sent: int | None) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", run.project)
        own: dict[str, Any] = {"name": run.name, "id": run_id, "dir": run.folder, "config": dict(run.settings)}
        # Without a limit, finish() waits for an unreachable server for days. An offline run of a killed process lacks
        # what was not flushed.
        limits: dict[str, Any] = {
            "finish_timeout": 300.0,
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 1.0,
        }
        settings = wandb.Settings(silent=True, console="off", **limits)
        self._run = wandb.init(project=project, resume="allow", reinit="create_new", settings=settings, **own)
        self.sent = sent if self._run.offline else self._run.starting_step - 1
        # A resumed run has another folder. `wandb sync` sends all that match, in their order, as one run.
        self.place = f"wandb sync {run.folder}/wandb/*-{run_id}" if self._run.offline else str(self._run.url)

    def log(self, values: Mapping[str, float], step: int, tables: Tables) -> None:
        from wandb import Image, Table

        shown = {}
        for table, rollouts in tables.items():
            most = max(len(row["images"]) for row in rollouts)
            images = [[*map(Image, row["images"]), *[None] * (most - len(row["images"]))] for row in rollouts]
            rows = [[*(row[name] for name in TEXTS), *beside] for row, beside in zip(rollouts, images, strict=True)]
            shown[table] = Table(columns=[*TEXTS, *(f"image {number}" for number in range(most))], data=rows)
        self._run.log({**values, **shown}, step=step, commit=True)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


Opener = Callable[[TrackerRun, str, int | None], Tracker]
TRACKERS: dict[str, Opener] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WeightsAndBiases}


def refuse_missing_trackers(names: Sequence[str], where: str = "machine.report_to") -> None:
    """Check that the trackers exist and that their packages are installed.

    Raises:
        ConfigurationError: there is no such tracker, its package is missing, or no API key is set for Weights & Biases.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigurationError(
                f"no tracker is called {name!r}", code="unknown_tracker", where=where, remedy=suggestion(name, TRACKERS)
            )
        if find_spec(name) is None:
            remedy = install_command(name)
            raise ConfigurationError(
                f"the package {name} is not installed", code="package_missing", where=where, remedy=remedy
            )
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online" and not os.environ.get("WANDB_API_KEY"):
        import wandb

        if not wandb.login(prompt=False, verify=False):  # it knows where else a key may be
            raise ConfigurationError(
                "Weights & Biases has no API key",
                code="tracker_key_missing",
                where=where,
                remedy="set WANDB_API_KEY in the environment, or WANDB_MODE=offline",
            )


def tracker_places(workspace: Path) -> dict[str, str]:
    """Return, for each tracker, where the run of the stage with this workspace can be seen: a URL or a command."""
    return dict(_read_state(workspace).get("places", {}))


def _read_state(workspace: Path) -> dict[str, Any]:
    """Return the content of the workspace's `STATE` file, or an empty dict if there is no such file."""
    path = workspace / STATE
    return dict(json.loads(path.read_text())) if path.exists() else {}


@contextmanager
def with_trackers(events: Events, names: Sequence[str], run: TrackerRun) -> Iterator[Events]:
    """Yield events that report to the trackers `names` and to `events`. At the end, say where each tracker has the run.

    A tracker's run begins with the first metrics, so a stage without metrics has none. A tracker that fails ends no
    run: there is one warning, and the steps that it could not take are sent again with the next ones.

    Raises:
        ConfigurationError: see `refuse_missing_trackers`.
    """
    refuse_missing_trackers(names)
    if not names:
        yield events
        return
    tracked, failed = TrackedEvents(events, names, run), True
    try:
        yield tracked
        failed = False
    finally:
        tracked.close(failed)


Row = tuple[int, Mapping[str, float], dict[str, Path]]
"""Number and metrics of a step, and the folders with its rollouts, by the name of the table that shows them."""


@dataclass
class _Sink:
    """A tracker, the last step that it has, and the rows that still have to be sent to it."""

    sent: int | None
    tracker: Tracker | None = None
    rows: list[Row] = field(default_factory=list)
    failed: bool = False


class TrackedEvents:
    """Events that pass everything on to `events`, and send metrics and rollouts to trackers as well."""

    def __init__(self, events: Events, names: Sequence[str], run: TrackerRun) -> None:
        self._events, self._run = events, run
        # A training that is made again from its beginning has the same fingerprint, but a new workspace and id.
        state, own = _read_state(run.workspace), run.fingerprint[:12]
        new: dict[str, Any] = {"id": f"{own}-{secrets.token_hex(3)}", "sent": {}, "places": {}}
        self._state = state if state.get("id", "").startswith(own) else new
        self._sinks = {name: _Sink(self._state["sent"].get(name)) for name in names}
        self._tables: dict[int, dict[str, Path]] = defaultdict(dict)
        self._last: int | None = None

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        self._events.progress(name, done, total, **postfix)
        if name == TRAINING:
            self._last = total

    def message(self, text: str) -> None:
        self._events.message(text)

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None:
        self._events.artifact(artifact, role, step)
        if role == "output" and step is not None:
            self._tables[step][artifact.kind] = artifact.path  # the step's metrics follow later

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._events.metrics(values, step)
        folders = self._folders_of(step)
        for name, sink in self._sinks.items():
            if sink.tracker is None and not sink.failed:  # a tracker that cannot be opened is not tried again
                with self._warning(name, sink):
                    sink.tracker = TRACKERS[name](self._run, self._state["id"], sink.sent)
                    sink.sent = sink.tracker.sent
            last = sink.rows[-1][0] if sink.rows else -1 if sink.sent is None else sink.sent
            if step > last:  # a resumed run may report the steps before its checkpoint again
                sink.rows += [*self._rows_between(last, step), (step, dict(values), dict(folders))]
                self._send(name, sink)
        self._write_state()

    def close(self, failed: bool) -> None:
        """Send the remaining rows, close the trackers, and report where they have the run and what they lack."""
        for name, sink in self._sinks.items():
            if sink.tracker is not None:
                self._send(name, sink)
                with self._warning(name, sink):
                    sink.tracker.close(failed)
                self.message(f"{name}: {sink.tracker.place}")
            if sink.rows:
                self.message(f"warning: {name} lacks {len(sink.rows)} steps, which are in {self._run.workspace}")
        if self._state["sent"] and not failed:  # an error here would hide the one that ended the run
            self._write_state()

    @contextmanager
    def _warning(self, name: str, sink: _Sink) -> Iterator[None]:
        """Suppress any error of a tracker in this block, and report the first one as a warning.

        The library of a tracker may raise anything, and an error in it must not end the run.
        """
        try:
            yield
        except Exception as error:
            if not sink.failed:
                self.message(f"warning: {name} failed, and the run continues: {blanked(f'{error!r:.500}')}")
            sink.failed = True

    def _send(self, name: str, sink: _Sink) -> None:
        with self._warning(name, sink):
            while sink.tracker is not None and sink.rows:
                step, values, folders = sink.rows[0]
                images = ImageStore(self._run.images)
                wanted = dict(folders)
                folders.clear()  # if an image or a table is refused, try again without it
                tables = {table: shown_rollouts(folder, images) for table, folder in wanted.items()}
                sink.tracker.log(values, step, {table: shown for table, shown in tables.items() if shown})
                del sink.rows[0]
                sink.sent = self._state["sent"][name] = step
                self._state["places"][name] = sink.tracker.place

    def _write_state(self) -> None:
        """Write the id of the runs, the last steps and the places to the `STATE` file of the workspace."""
        write_file(self._run.workspace / STATE, dump_json(self._state))

    def _rows_between(self, last: int, step: int) -> list[Row]:
        """Return the rows of the steps after `last` and before `step`, read from the run's history.

        The tracker lacks these steps if an earlier process crashed before it had sent them.
        """
        if step == last + 1:
            return []
        history = History(self._run.workspace / "history.jsonl").read()
        rows = [(int(row["step"]), {name: value for name, value in row.items() if name != "step"}) for row in history]
        return [(number, values, {}) for number, values in rows if last < number < step]

    def _folders_of(self, step: int) -> dict[str, Path]:
        """Return the folders with the rollouts to show at this step, by the name of their table.

        The rollouts of an evaluation are always shown, the rollouts of training at the first and the last step.
        """
        shown = step in (1, self._last)
        return {kind: path for kind, path in self._tables.pop(step, {}).items() if shown or kind != "rollouts"}


def shown_rollouts(folder: Path, images: ImageStore) -> list[dict[str, Any]]:
    """Return the first rollout of each of the first `ROLLOUTS` groups in the folder's `rollouts.parquet`.

    A row has the first prompt, all answers, and the images of the last prompt. The list is empty if the folder has no
    such table, or if the table has robots' actions instead of texts.
    """
    path = folder / "rollouts.parquet"
    columns = ["group_id", "trajectory_id", "task_id", "images", "messages", "completion", "reward"]
    if not path.is_file() or not set(columns) <= set(pq.read_schema(path).names):
        return []
    shown = []
    for _, group in islice(groupby(pq.read_table(path, columns=columns).to_pylist(), itemgetter("group_id")), ROLLOUTS):
        turns = list(next(groupby(group, itemgetter("trajectory_id")))[1])
        row = {
            "rollout": turns[0]["trajectory_id"],
            "task": turns[0]["task_id"],
            "images": [_still(images, ImageRef(**each)) for each in turns[-1]["images"][:IMAGES]],
            "prompt": "\n".join(_texts(json.loads(turns[0]["messages"]))),
            "answer": " / ".join(turn["completion"] for turn in turns),
            "reward": sum(turn["reward"] for turn in turns),
        }
        shown.append(row)
    return shown


def _still(images: ImageStore, ref: ImageRef) -> Any:
    """Return an image, or the first frame of a video."""
    return decode(EncodedImage(images.read(ref), ref.media_type))


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of chat messages, without their images."""
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield from (part["text"] for part in parts if part["type"] == "text")
