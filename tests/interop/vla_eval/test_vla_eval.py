"""vla-eval's benchmarks ask a policy that we serve, by examples/vla_eval_policy.py, in an environment of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from tests.robots.policies.molmoact2 import released
from tests.robots.server.conftest import KEY, running

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-programs/bin/python"
BRIDGE, BENCHMARK = ROOT / "examples/vla_eval_policy.py", Path(__file__).with_name("benchmark.py")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> MolmoAct2Policy:
    settings = released.SETTINGS.model_copy(update={"norm_tag": "kitchen", "num_inference_steps": 2})
    loaded = load_policy(released.write_released(tmp_path_factory.mktemp("policy") / "released"), settings)
    return MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)


@contextmanager
def bridge(url: str, log: Path, batch: int) -> Iterator[str]:
    """Run the bridge while the block runs, and yield the address at which benchmarks use it. It asks the policy that is
    served at `url`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [PYTHON, BRIDGE, "--args.url", url, "--address", address, "--args.max_batch_size", str(batch)]
    environment = {**os.environ, "ARMATURE_POLICY_KEY": KEY}
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(address.split(":"), 1).close()  # type: ignore[arg-type]
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
            yield f"ws://{address}"
        finally:
            process.terminate()


def evaluated(url: str, runs: int) -> dict[str, Any]:
    done = subprocess.run(
        [PYTHON, BENCHMARK, url, str(runs)], capture_output=True, text=True, timeout=300, cwd=BENCHMARK.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def expected(policy: MolmoAct2Policy, task: str, episode: int) -> list[list[float]]:
    """Return the actions that the policy predicts for the benchmark's observations of one episode, computed without the
    bridge."""
    actions: list[list[float]] = []
    while len(actions) < 6:
        step = len(actions)
        rng = np.random.default_rng((len(task), episode, step))
        images = [rng.integers(0, 256, shape, np.uint8) for shape in ((40, 50, 3), (28, 28, 3))]
        state = rng.uniform(-1, 1, 8).astype(np.float32)
        about = {"name": task, "suite": "table", "episode_idx": episode}
        seed = int.from_bytes(sha256(json.dumps([about, step], sort_keys=True).encode()).digest()[:4], "big")
        seen = RobotObservation(dict(zip(released.CAMERAS, images, strict=True)), state, task)
        actions += policy.predict([seen], [seed])[0].astype(np.float64).tolist()
    return actions[:6]


@pytest.mark.parametrize(("batch", "runs"), [(1, 1), (8, 3)])
def test_benchmark_executes_the_policy_actions(policy, tmp_path, batch, runs):
    with running(policy) as server, bridge(server.url, tmp_path / "log", batch) as url:
        answer = evaluated(url, runs)
    ours = {f"{task}/{k}": expected(policy, task, k) for task in ("put the bowl away", "wait") for k in range(2)}
    assert answer["played"] == [ours] * runs
    assert answer["result"]["mean_success"] == 1.0, answer["result"]


def test_policy_error_reaches_the_benchmark(policy, tmp_path):
    with running(policy) as server, bridge(server.url, tmp_path / "log", 1) as url:
        done = subprocess.run(
            [PYTHON, "-c", REFUSED, url, str(BENCHMARK.parent)], capture_output=True, text=True, timeout=300
        )
    assert "field 'observation.state'" in done.stdout + done.stderr + (tmp_path / "log").read_text()


REFUSED = """
import sys
sys.path.insert(0, sys.argv[2])
import benchmark
plain = benchmark.seen
benchmark.seen = lambda *of: {**plain(*of), "states": plain(*of)["states"][:3]}
print(benchmark.evaluate(sys.argv[1], 1))
"""
