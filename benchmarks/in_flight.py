"""Seconds per step of `train-vlm` where one episode in eight is thirty times as long, by how far rollouts run ahead."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from anyio.from_thread import start_blocking_portal

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.episodes import Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.environments.colors import Colors, ColorsEpisode, ColorsSettings
from armature.components.inference.server import VllmServer
from armature.components.inference.settings import ServerSettings
from benchmarks.table import Row, pair

STEPS, SETTLED, ROUNDS = 8, 3, 3
SHORT, LONG, EVERY = 0.2, 6.0, 8
WAYS = {"in turn": (0, False), "one step ahead": (1, False), "updates in flight, four steps ahead": (4, True)}
KEY = "a key for this benchmark"
RECIPE = (
    'environment.name="benchmarks.in_flight:Uneven"',
    "rollouts.groups_per_step=16",
    "rollouts.group_size=4",
    f"trainer.max_steps={STEPS}",
    f"trainer.save_every={STEPS}",
    "evaluation.every=0",
    "preflight.groups=1",
    "machine.limits.max_concurrent=16",
)


class Uneven(Colors):
    """The environment `Colors`, in which judging an answer takes `SHORT` or `LONG` seconds, as with a simulator or a
    test suite."""

    name = "uneven"

    def episode(self, task: Task) -> ColorsEpisode:
        image = self._paint(task.payload["color"], task.payload["seed"])
        return UnevenEpisode(image, task.payload["color"], self.settings, LONG if task.payload["long"] else SHORT)

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return super().payload(seed, index) | {"long": index % EVERY == 0}


class UnevenEpisode(ColorsEpisode):
    def __init__(self, image: EncodedImage, color: str, settings: ColorsSettings, seconds: float) -> None:
        super().__init__(image, color, settings)
        self._seconds = seconds

    async def step(self, action: str) -> Outcome:
        await asyncio.sleep(self._seconds)
        return await super().step(action)


def measure() -> list[Row]:
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        tasks, model = (_stage(name, Path(scratch)) for name in ("tasks", "model"))
        for number in range(ROUNDS):
            for name in WAYS:
                with _server(model.path, Path(scratch)) as url:
                    taken[name].append(_step_seconds(name, Path(scratch) / f"{number}-{name}", url, tasks, model))
    note = (
        f"64 episodes a step, 16 at once; one in {EVERY} takes {LONG:g} s, others {SHORT:g} s; from step {SETTLED} on"
    )
    rows = []
    *others, ours = WAYS
    for name in others:
        both = pair(taken[ours], taken[name])
        rows.append(Row(f"a step, {ours}", both.ours, both.baseline, name, "s", "lower", note, both.spread))
    return rows


def _stage(name: str, folder: Path, *more: str, **inputs: Artifact) -> Artifact:
    recipe = load_recipe("train-vlm/colors", (*RECIPE, f'machine.store="{folder}"', *more))
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    return run_stage(name, recipe.settings_for(STAGES[name].settings), inputs, machine)


def _step_seconds(name: str, folder: Path, url: str, tasks: Artifact, model: Artifact) -> float:
    staleness, in_flight = WAYS[name]
    made = _stage(
        "train-vlm",
        folder,
        f"rollouts.max_staleness={staleness}",
        f"rollouts.in_flight_updates={str(in_flight).lower()}",
        f'machine.servers.endpoints=["{url}"]',
        tasks=tasks,
        model=model,
    )
    history = json.loads((made.path / "history.json").read_text())
    return statistics.mean(row["timing/step"] for row in history if row["step"] >= SETTLED)


@contextmanager
def _server(model: Path, folder: Path) -> Iterator[str]:
    recipe = load_recipe("train-vlm/colors", RECIPE)
    settings, machine = recipe.sections["inference"], recipe.sections["machine"]
    assert isinstance(settings, ServerSettings) and isinstance(machine, Machine)
    with patch.dict("os.environ", VLLM_API_KEY=KEY), start_blocking_portal() as portal:
        server = VllmServer(settings, machine, index=0, log_folder=folder / "server", api_key=KEY)
        portal.call(server.start, model)
        try:
            yield server.url
        finally:
            portal.call(server.stop)
