"""Real servers that join and leave a training: the weights are those of a training with one server throughout."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from components.configuration import load_recipe
from components.contracts.machine import Machine
from components.contracts.stages import Artifact, Events
from components.stages import STAGES, run_stage
from tests.conftest import SharedServer, real_server

STEPS = 6
OVERRIDES = (
    f"trainer.max_steps={STEPS}",
    "rollouts.groups_per_step=8",
    "rollouts.group_size=4",
    "preflight.groups=1",
    "environment.heldout_tasks=1",
    "evaluation.every=0",
    "model.tiny.format.steps=20",
    "inference.deterministic=true",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class ChangesServers:
    """Rewrites the list of servers as a training goes on, and waits until the pool says that it follows."""

    def __init__(self, file: Path, first: str, second: str, said: Callable[[], list[str]]) -> None:
        self._file, self._said = file, said
        self._lists = {2: [first, second], 4: [second]}
        file.write_text(first)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        if step not in self._lists:
            return
        before, deadline = len(self._said()), time.monotonic() + 60
        self._file.write_text("\n".join(self._lists[step]))
        while len(self._said()) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


@pytest.fixture
def second(shared_server: SharedServer, tmp_path: Path) -> Iterator[str]:
    """The URL of another server."""
    server = real_server(tmp_path / "logs", shared_server.key)
    asyncio.run(server.start(shared_server.checkpoint))
    yield server.url
    server.end()


def train(store: Path, servers: str, events: Events | None = None) -> Artifact:
    recipe = load_recipe("train-vlm/colors", (*OVERRIDES, f'machine.store="{store}"', servers))
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)

    def stage(name: str, inputs: dict[str, Artifact]) -> Artifact:
        return run_stage(name, recipe.settings_for(STAGES[name].settings), inputs, machine, events)

    return stage("train-vlm", {name: stage(name, {}) for name in ("tasks", "model")})


def test_one_joins_and_one_leaves(
    tmp_path: Path, joined_url: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone = train(tmp_path / "alone", f'machine.endpoints=["{joined_url}"]')

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "components.inference.members"]

    file = tmp_path / "servers.txt"
    events = ChangesServers(file, joined_url, second, said)
    changing = train(tmp_path / "changing", f'machine.endpoints_file="{file}"', events)
    assert said() == [f"{second} joins the pool", f"{joined_url} has left the pool"]
    digests = [
        hashlib.sha256((made.path / "checkpoint/model.safetensors").read_bytes()).hexdigest()
        for made in (alone, changing)
    ]
    assert digests[0] == digests[1]
    history = json.loads((changing.path / "history.json").read_text())
    assert [(row["step"], row["rollouts/failed"]) for row in history] == [(step, 0) for step in range(1, STEPS + 1)]
    assert [row["policy_version/min"] for row in history] == [row["policy_version/max"] for row in history]
