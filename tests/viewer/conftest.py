"""A store with a training that is not finished: rollouts, batches, tasks, a history."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.json_lines import History
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.artifacts.tables import write_table
from armature.components.configuration.stages import STARTED
from armature.components.contracts.batches import Sample
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from armature.components.environments.stage import TASKS
from armature.components.rollouts.batches.ratios import ratios_file, write_log_ratios
from armature.components.rollouts.batches.table import write_batch
from armature.components.rollouts.table import write_rollouts
from armature.components.viewer.app import ViewServer, view_app
from tests.browser import CHROMIUM
from tests.pages.conftest import make_trajectory

RUN = "0123456789abcdef0123"
TOKEN = "the-token"


@contextmanager
def viewed(root: Path, query: str = "") -> Iterator[Any]:
    """Open the viewer of the store at `root` in a browser, and yield the page.

    The page gets the attribute `problems`, a list of its console messages and uncaught errors.
    """
    from playwright.sync_api import sync_playwright

    server = uvicorn.Server(uvicorn.Config(view_app(ViewServer(root), TOKEN), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}{query}")
        page.locator(".chart").first.wait_for()
        yield page
        browser.close()
    server.should_exit = True
    thread.join()


@dataclass(frozen=True)
class Training:
    """A training in the store at `root`. Its methods write the files that a real run would write."""

    root: Path
    image: ImageRef
    run: str = RUN

    @property
    def workspace(self) -> Path:
        return self.root / "workspaces" / f"train-vlm-{self.run}"

    def begin(self, tasks: Path) -> None:
        settings = {"environment": {"name": "colors"}, "model": {"source": "tiny"}, "trainer": {"max_steps": 9}}
        self.workspace.mkdir(parents=True)
        document = {"settings": settings, "inputs": {"tasks": str(tasks), "model": str(self.root / "gone")}}
        (self.workspace / STARTED).write_text(json.dumps(document))

    def step(
        self, step: int, rewards: Sequence[float], completions: Sequence[str] = (), failures: Sequence[Failure] = ()
    ) -> None:
        """Write the rollouts, the batch and the log-ratios of a step with one group of the task `red`.

        Tokens have an advantage of twice the reward, and an importance ratio of e^reward.
        """
        name, group = f"{self.run}-{step:05d}", f"{step:05d}-0000"
        trajectories = self._write("rollouts", name, group, rewards, completions, failures)
        samples = [sample_of(each) for each in trajectories]

        def batch(folder: Path) -> None:
            write_batch(folder, samples)
            write_manifest(folder, kind="batches", kind_version=1, rows={}, drops={}, inputs={}, settings={})

        ArtifactStore(self.root).write("batches", f"{self.run}-{step:05d}", batch)
        ratios = {row: np.full(sample.loss_mask.sum(), sample.reward, np.float32) for row, sample in enumerate(samples)}
        write_log_ratios(ratios_file(self.workspace, step), samples, ratios)
        History(self.workspace / "history.jsonl").append(step, {"reward": float(np.mean(rewards))})

    def heldout(self, step: int, rewards: Sequence[float], completions: Sequence[str] = ()) -> None:
        """Write the rollouts of the held-out set after `step`. Its only task is `red` too."""
        self._write("evaluations", f"{self.run}-{step:05d}", "00000-0000", rewards, completions)

    def evaluation(self, run: str, model: Path, rewards: Sequence[float], completions: Sequence[str] = ()) -> None:
        """Write an evaluation, called `run`, of `model` on the tasks of this training."""
        tasks = json.loads((self.workspace / STARTED).read_text())["inputs"]["tasks"]
        workspace = self.root / "workspaces" / f"evaluate-{run}"
        workspace.mkdir()
        inputs = {"tasks": tasks, "model": str(model)}
        document = {"settings": {"evaluation": {"splits": ["heldout"]}}, "inputs": inputs}
        (workspace / STARTED).write_text(json.dumps(document))
        self._write("evaluate", run, "00000-0000", rewards, completions)

    def _write(
        self,
        kind: str,
        name: str,
        group: str,
        rewards: Sequence[float],
        completions: Sequence[str],
        failures: Sequence[Failure] = (),
    ) -> list[Trajectory]:
        output = [*completions, *["red"] * (len(rewards) - len(completions))]
        trajectories = [
            replace(
                make_trajectory(f"{group}-{i:02d}", (self.image,), completion=text, reward=reward, group=group),
                task_id="red",
            )
            for i, (reward, text) in enumerate(zip(rewards, output, strict=True))
        ]

        def fill(folder: Path) -> None:
            write_rollouts(folder, GenerateOutputs(trajectories, failures))
            write_manifest(folder, kind=kind, kind_version=1, rows={}, drops={}, inputs={}, settings={})

        ArtifactStore(self.root).write(kind, name, fill)
        return trajectories


def sample_of(trajectory: Trajectory) -> Sample:
    (turn,) = trajectory.turns
    ids = np.concatenate([turn.prompt_token_ids, turn.completion_token_ids])
    mask = np.arange(len(ids)) >= len(turn.prompt_token_ids)
    return Sample(
        sample_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        trajectory_id=trajectory.trajectory_id,
        input_ids=ids,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, 2 * trajectory.reward, 0.0).astype(np.float32),
        reward=trajectory.reward,
        images=turn.images,
    )


@pytest.fixture
def training(tmp_path: Path) -> Training:
    root, tasks = tmp_path / "store", tmp_path / "tasks"
    tasks.mkdir()
    rows: list[dict[str, object]] = [{"task_id": "red", "split": "train", "payload": json.dumps({"color": "red"})}]
    write_table(tasks / "train.parquet", rows, TASKS)
    made = Training(root, ImageStore(root / "images").put(encode_png(Image.new("RGB", (56, 56), (220, 40, 40)))))
    made.begin(tasks)
    return made
