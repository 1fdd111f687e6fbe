"""Requests to `armature view` and actions of the artifact store, with a thousand to a million rollouts and images.

The store of each size is built with the project's writers, and a process of its own measures. Rollouts have one image
each; a thousand of them are a step of one training. For each step there are one more training and one
evaluation that lack rollouts, and one evaluation has as many rollouts as the training, in one table.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.json_lines import History
from armature.components.artifacts.manifest import read_manifest, write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.artifacts.tables import read_table, write_table
from armature.components.configuration.stages import STARTED
from armature.components.contracts.images import ImageRef
from armature.components.environments.stage import TASKS
from armature.components.rollouts.table import FAILURES, ROLLOUTS
from benchmarks import view
from benchmarks.table import Row, seconds, short
from benchmarks.view import RUN, write_step

SIZES = (1_000, 10_000, 100_000, 1_000_000)
STEP_ROWS, ROUNDS, AT_ONCE = 1000, 7, 10_000
EVALUATION = "e" * 20
ROOT = Path(__file__).parents[1]


def measure() -> list[Row]:
    taken = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            build(Path(scratch), size)
            words = [scratch, str(size), str(STEP_ROWS), str(ROUNDS)]
            output = subprocess.check_output([sys.executable, "-m", "benchmarks.scale", *words], cwd=ROOT, text=True)
            taken.append(json.loads(output.splitlines()[-1]))
    return [_row(what, unit, [each[what][0] for each in taken]) for what, (_, unit) in taken[0].items()]


def _row(what: str, unit: str, figures: list[float]) -> Row:
    """Compare the largest size with the smallest. The note has all sizes and the exponent of the growth."""
    x, y = np.log(SIZES), np.log(np.maximum(figures, 1e-9))
    note = f"{', '.join(short(each) for each in figures)}; grows as rows^{np.polyfit(x, y, 1)[0]:.2f}"
    return Row(what, figures[-1], figures[0], f"with {SIZES[0]:,}", unit, "lower", note)


def build(root: Path, size: int) -> None:
    """Write a store with `size` rollouts in steps of STEP_ROWS, and as many images."""
    store, images = ArtifactStore(root), ImageStore(root / "images")
    tasks, parts, shown = root / "tasks/t", [], []
    for first in range(0, size, AT_ONCE):
        encoded = [encode_png(Image.fromarray(_pixels(number))) for number in range(first, min(size, first + AT_ONCE))]
        refs = [ImageRef(each.sha256, each.media_type, 8, 8) for each in encoded]
        images.keep({ref: each.data for ref, each in zip(refs, encoded, strict=True)})
        shown += [asdict(ref) for ref in refs]
    for step in range(1, size // STEP_ROWS + 1):

        def fill(folder: Path, step: int = step) -> None:
            parts.append(write_step(folder, step, STEP_ROWS // view.SIZE, shown))
            _manifest(folder, "rollouts")

        store.write("rollouts", f"{RUN}-{step:05d}", fill)
        _begin(root, "train-vlm", RUN if step == 1 else f"{step:020x}", {"tasks": str(tasks), "model": str(root / "m")})
        trained = {"tasks": str(tasks), "model": str(root / f"train-vlm/{step:020x}")}
        _begin(root, "evaluate", EVALUATION if step == 1 else f"f{step:019x}", trained)
        History(root / f"workspaces/train-vlm-{RUN}/history.jsonl").append(
            step, {f"{group}/{name}": 1 / step for group in ("trainer", "batch", "timing") for name in "abcdefgh"}
        )

    def evaluation(folder: Path) -> None:
        write_table(folder / "rollouts.parquet", pa.concat_tables(parts), ROLLOUTS)
        write_table(folder / "failures.parquet", [], FAILURES)
        _manifest(folder, "evaluate")

    def described(folder: Path) -> None:
        payload = json.dumps({"question": "which?" * 20})
        columns = [[f"task-{number:07d}" for number in range(size)], ["test"] * size, [payload] * size]
        write_table(folder / "test.parquet", pa.table(columns, TASKS.schema), TASKS)
        _manifest(folder, "tasks")

    store.write("evaluate", EVALUATION, evaluation)
    store.write("tasks", "t", described)


def _pixels(number: int) -> Any:
    return np.frombuffer(f"{number:0192d}".encode(), np.uint8).reshape(8, 8, 3)


def _manifest(folder: Path, kind: str) -> None:
    write_manifest(folder, kind=kind, kind_version=1, rows={}, drops={}, inputs={}, settings={"of": "a benchmark"})


def _begin(root: Path, stage: str, fingerprint: str, inputs: dict[str, str]) -> None:
    settings = {"environment": {"name": "colors"}, "model": {"source": "tiny"}, "trainer": {"max_steps": 1000}}
    settings |= {"evaluation": {"splits": ["test"]}}
    settings |= {f"section-{number}": dict.fromkeys("abcdefghij", number) for number in range(20)}
    (folder := root / "workspaces" / f"{stage}-{fingerprint}").mkdir(parents=True)
    (folder / STARTED).write_text(json.dumps({"settings": settings, "inputs": inputs}))


def ask(root: Path, size: int, rows: int, rounds: int) -> dict[str, tuple[float, str]]:
    """Return the smallest of each measurement and its unit. Reading everything is given per thousand rollouts."""
    from starlette.testclient import TestClient

    from armature.components.viewer.app import ViewServer, view_app

    store, images, numbers = ArtifactStore(root), ImageStore(root / "images"), count(time.time_ns())
    server = ViewServer(root)
    client = TestClient(view_app(server, "t"), "http://127.0.0.1", headers={"authorization": "Bearer t"})
    thousands, last = size / 1000, size // rows
    first = store.find("rollouts", f"{RUN}-{last:05d}")
    assert first is not None
    shown = read_table(first.path / "rollouts.parquet", ROLLOUTS, columns=["images"])["images"][0][0].as_py()
    taken: dict[str, tuple[float, str]] = {}
    taken["view: read all tables, per 1,000 rollouts"] = (seconds(server.index.refresh) / thousands, "s")

    def page(address: str) -> Callable[[], Any]:
        def get() -> Any:
            answer = client.get(address)
            assert answer.status_code == 200, answer.text
            return answer

        return get

    def put() -> None:
        images.put(encode_png(Image.fromarray(_pixels(next(numbers)))))

    def write() -> None:
        store.write("rollouts", f"{'a' * 20}-{next(numbers)}", partial(_manifest, kind="rollouts"))

    def begin() -> None:
        with store.lock("evaluate", EVALUATION):
            pass

    run, evaluation = f"/api/runs/{RUN}", f"/api/runs/{EVALUATION}"
    assert page(f"{run}/rollouts")().json()["total"] == page(f"{evaluation}/rollouts")().json()["total"] == size
    actions: dict[str, Callable[[], Any]] = {
        "view: look for new tables": server.index.refresh,
        "view: list of runs": page("/api/runs"),
        "view: curves of a run": page(f"{run}/history"),
        "view: first page of rollouts": page(f"{run}/rollouts?limit=100"),
        "view: page in the middle": page(f"{run}/rollouts?limit=100&offset={size // 2}"),
        "view: newest rollouts": page(f"{run}/rollouts?limit=100&sort=newest"),
        "view: rollouts with a text, the longest first": page(f"{run}/rollouts?find=light+falls&sort=length-"),
        "view: failures": page(f"{run}/failures"),
        "view: tasks": page(f"{run}/tasks"),
        "view: one group of a step": page(f"{run}/groups/train/{last}/{last:05d}-0000"),
        "view: one group of an evaluation": page(f"{evaluation}/groups/evaluation/0/{last:05d}-0000"),
        "view: an image": page(f"/images/{shown['sha256']}.png"),
        "store: open": lambda: ArtifactStore(root),
        "store: a stage begins": begin,
        "store: find an artifact": lambda: store.find("rollouts", f"{RUN}-{last:05d}"),
        "store: read a manifest": lambda: read_manifest(first.path),
        "store: write a small artifact": write,
        "store: put a new image": put,
        "store: put a known image": lambda: images.put(encode_png(Image.fromarray(_pixels(0)))),
        "store: read an image": lambda: images.read(ImageRef(**shown)),
        "store: list artifacts": lambda: sum(1 for _ in store),
        "store: find by digest": lambda: store.find_digest(first.digest),
    }
    for what, action in actions.items():
        action()
        gc.collect()
        taken[what] = (min(seconds(action) for _ in range(rounds)), "s")
    taken["peak memory of the process"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB")
    client.close()
    server.index.close()
    return taken


if __name__ == "__main__":
    print(json.dumps(ask(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
