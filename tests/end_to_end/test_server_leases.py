"""Two runs that want the same real servers: one waits for the other, and both end with the weights of one server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.stages import Artifact
from armature.components.machine.process import Program
from tests.conftest import real_server
from tests.end_to_end.conftest import make

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


@pytest.fixture
def second(shared_server, tmp_path) -> Iterator[str]:
    """The URL of a second server, which has the key and the checkpoint of the shared server."""
    server = real_server(tmp_path / "logs", shared_server.key)
    asyncio.run(server.start(shared_server.checkpoint))
    yield server.url
    server.end()


def train(store: Path, servers: str) -> Artifact:
    recipe = load_recipe("train-vlm/colors", (*OVERRIDES, f'machine.store="{store}"', servers))
    return make(recipe, "train-vlm", **{name: make(recipe, name) for name in ("tasks", "model")})


@pytest.fixture(scope="module")
def alone(shared_server, tmp_path_factory) -> Artifact:
    """The artifact of a training that no other run disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", shared_server.key)
        return train(tmp_path_factory.mktemp("alone"), f'machine.servers.endpoints=["{shared_server.url}"]')


def digest(made: Artifact) -> str:
    return hashlib.sha256((made.path / "checkpoint/model.safetensors").read_bytes()).hexdigest()


def refuse_lost_rollouts(made: Artifact) -> None:
    history = json.loads((made.path / "history.json").read_text())
    assert [(row["step"], row["rollouts/failed"]) for row in history] == [(step, 0) for step in range(1, STEPS + 1)]
    assert [row["policy_version/min"] for row in history] == [row["policy_version/max"] for row in history]


def begin(folder: Path, servers: Sequence[str]) -> Program:
    """Start a run in a process of its own. It waits up to 900 s for servers that another run uses."""
    machine = (f'store="{folder}/store"', f"servers.endpoints={json.dumps(servers)}", "limits.lease_timeout=900")
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


def test_killed_run_frees_its_servers_for_the_waiting_run(tmp_path, alone, joined_url, second):
    servers = [joined_url, second]
    runs = {name: begin(tmp_path / name, arguments) for name, arguments in (("one", servers), ("other", servers[::-1]))}

    def waiting() -> list[str]:
        return [name for name, run in runs.items() if "which another run uses" in run.tail(1000)]

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
