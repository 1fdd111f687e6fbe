"""examples/robot_client.py, a program of its own, is given what the policy answers."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from tests.robots.policies.molmoact2 import released
from tests.robots.server.conftest import KEY, policy, running

__all__ = ["policy"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/robot_client.py"
TASK = "put the bowl away"


def run(url: str, key: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ARMATURE_POLICY_KEY": key, "PYTHONPATH": ""}
    command = [sys.executable, str(EXAMPLE), url, TASK]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_robot_client_prints_the_policy_actions(policy: MolmoAct2Policy, tmp_path: Path) -> None:
    gray = np.full((224, 224, 3), 128, np.uint8)
    seen = RobotObservation(dict.fromkeys(released.CAMERAS, gray), np.zeros(8, np.float32), TASK)
    expected = [action for seed in (0, 1) for action in policy.predict([seen], [seed])[0]]
    with running(policy) as server:
        done = run(server.url, KEY, tmp_path)
        refused = run(server.url, "another-key", tmp_path)
    assert done.returncode == 0, done.stderr
    printed = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    np.testing.assert_allclose(printed, np.round(expected, 3), atol=1e-6)
    assert refused.returncode != 0 and "401" in refused.stderr


def test_robot_client_needs_no_armature() -> None:
    imports = [
        node for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {
        "msgpack",
        "numpy",
        "websockets",
    }
