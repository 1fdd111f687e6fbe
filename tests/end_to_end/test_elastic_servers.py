"""Real servers that join and leave a training, or that it starts and stops: the weights are those of one server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, Events
from armature.components.inference import members
from armature.components.inference.pool import OPEN
from armature.components.process import Program
from armature.components.stages import STAGES, run_stage
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


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


@pytest.fixture(scope="module")
def alone(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """What a training with one server ends with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", shared_server.key)
        return train(tmp_path_factory.mktemp("alone"), f'machine.endpoints=["{shared_server.url}"]')


def digest(made: Artifact) -> str:
    return hashlib.sha256((made.path / "checkpoint/model.safetensors").read_bytes()).hexdigest()


def refuse_lost_rollouts(made: Artifact) -> None:
    history = json.loads((made.path / "history.json").read_text())
    assert [(row["step"], row["rollouts/failed"]) for row in history] == [(step, 0) for step in range(1, STEPS + 1)]
    assert [row["policy_version/min"] for row in history] == [row["policy_version/max"] for row in history]


def test_one_joins_and_one_leaves(
    tmp_path: Path, alone: Artifact, joined_url: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [
            record.getMessage() for record in caplog.records if record.name == "armature.components.inference.members"
        ]

    file = tmp_path / "servers.txt"
    events = ChangesServers(file, joined_url, second, said)
    changing = train(tmp_path / "changing", f'machine.endpoints_file="{file}"', events)
    assert said() == [f"{second} joins the pool", f"{joined_url} has left the pool"]
    assert digest(changing) == digest(alone)
    refuse_lost_rollouts(changing)


def begin(folder: Path, servers: Sequence[str]) -> Program:
    """A run as a process of its own, which waits for servers that another one has."""
    machine = (f'store="{folder}/store"', f"endpoints={json.dumps(servers)}", "lease_timeout=900")
    command = [sys.executable, "-m", "tests.production.recipe_stages", "train-vlm/colors", *OVERRIDES]
    folder.mkdir(exist_ok=True)
    return Program(
        [*command, *(f"machine.{fact}" for fact in machine)],
        log=folder / "run.log",
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def wait_for(condition: Callable[[], object], *running: Program) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        ended = [run.tail(60) for run in running if run.returncode is not None or time.monotonic() > deadline]
        assert not ended, ended[0]
        time.sleep(0.05)


def made_by(run: Program, folder: Path) -> Artifact:
    assert run.wait(600) == 0, run.tail(60)
    (made,) = (each for each in (folder / "store/train-vlm").iterdir() if (each / "history.json").exists())
    return Artifact(kind="train-vlm", path=made, digest="")


def test_a_run_that_is_killed_leaves_its_servers_to_the_one_that_waits(
    tmp_path: Path, alone: Artifact, joined_url: str, second: str
) -> None:
    servers = [joined_url, second]
    runs = {name: begin(tmp_path / name, given) for name, given in (("one", servers), ("other", servers[::-1]))}

    def waiting() -> list[str]:
        return [name for name, run in runs.items() if "which another run has" in run.tail(1000)]

    wait_for(waiting, *runs.values())
    (waits,) = waiting()
    (killed,) = runs.keys() - {waits}
    wait_for(lambda: list((tmp_path / killed).glob("store/workspaces/*/history.jsonl")), *runs.values())
    module = ["-m", "tests.production.recipe_stages"]
    next(each for each in runs[killed].family() if each.cmdline()[1:3] == module).kill()
    began = time.monotonic()
    assert runs[killed].wait(60) == -signal.SIGKILL
    wait_for(lambda: list((tmp_path / waits).glob("store/workspaces/*/history.jsonl")), runs[waits])
    print(f"the run that waited made its first step {time.monotonic() - began:.0f} s after the kill")
    runs[killed] = begin(tmp_path / killed, servers)
    for name, run in runs.items():
        made = made_by(run, tmp_path / name)
        assert digest(made) == digest(alone)
        refuse_lost_rollouts(made)


class WaitsForServers:
    """Holds a training up after step 2 until the pool has started a server, after step 4 until it has stopped it."""

    def __init__(self, said: Callable[[str], bool]) -> None:
        self._said, self._waited_for = said, {2: "vllm-1 is back", 4: "vllm-1 has left the pool"}

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        deadline = time.monotonic() + 300
        while step in self._waited_for and not self._said(self._waited_for[step]):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None: ...

    def artifact(self, artifact: Artifact, role: str, step: int | None = None) -> None: ...

    def message(self, text: str) -> None: ...


def test_one_is_started_for_requests_that_wait_and_stopped_when_idle(
    tmp_path: Path, alone: Artifact, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "READ_EVERY", 0.01)
    scaling = "{max_servers=2, target_ongoing_requests=2, upscale_delay=0, downscale_delay=10}"
    asked, done = set[str](), threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            asked.update(replica.name for pool in OPEN for replica in list(pool.replicas) if replica.outstanding)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        changing = train(tmp_path, f"machine.server_autoscaling={scaling}", WaitsForServers(lambda s: s in caplog.text))
    finally:
        done.set()
        looking.join()
    assert "vllm-1 joins the pool" in caplog.text and asked == {"vllm-0", "vllm-1"}
    assert digest(changing) == digest(alone)
    refuse_lost_rollouts(changing)
