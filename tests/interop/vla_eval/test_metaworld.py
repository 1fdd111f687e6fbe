"""Meta-World, played through vla-eval: by its scripted policies as without any server, and by a policy of LeRobot's.

The simulator is in the environment of programs, LeRobot in its own. `make interop-vla-eval` makes both.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.configuration import load_recipe
from armature.components.contracts.stages import Artifact
from armature.components.robots.evaluation.results import LiberoResult, read_results
from armature.components.robots.evaluation.schedule import noise_seed
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.policies.stage import POLICY_STAGE
from armature.components.robots.served.runs import planned_episodes
from armature.components.robots.served.settings import EvaluateBenchmarkStageSettings
from armature.components.robots.served.stage import EVALUATE_BENCHMARK_STAGE
from tests.interop.lerobot.conftest import side
from tests.robots.evaluation.test_stage import Events, context

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-programs/bin/python"
SIDE = Path(__file__).with_name("metaworld_side.py")
TASKS, EPISODES, SEED, STEPS = ("reach-v3", "peg-insert-side-v3"), 2, 5, 60
SIDE_OF_IMAGES = 64


@pytest.fixture(scope="module")
def expert(tmp_path_factory) -> Iterator[str]:
    """Address of a server of openpi's protocol that answers with the actions of Meta-World's scripted policies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("expert") / "log"
    with log.open("w") as output, subprocess.Popen([PYTHON, SIDE, "serve", str(port)], stderr=output) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
            yield f"ws://127.0.0.1:{port}"
        finally:
            process.terminate()


def settings(state: int = 39, **plan: Any) -> EvaluateBenchmarkStageSettings:
    """The recipe's settings with small images. Scripted policies need the whole state, which has 39 numbers."""
    recipe = load_recipe("evaluate/metaworld").settings_for(EvaluateBenchmarkStageSettings).model_dump(mode="json")
    recipe["benchmark"] |= {"python": str(PYTHON), "folder": str(ROOT / "examples"), "resolution": SIDE_OF_IMAGES}
    recipe["benchmark"]["params"] = {"seed": SEED, "resolution": SIDE_OF_IMAGES, "full_state": state == 39}
    recipe["benchmark"]["conventions"]["state_dimensions"] = state
    counts = {"tasks": TASKS, "episodes_per_task": EPISODES, "max_steps": STEPS, "n_action_steps": 1}
    recipe["evaluation"] |= {**counts, **plan}
    return EvaluateBenchmarkStageSettings.model_validate(recipe)


def evaluate(
    folder: Path, chosen: EvaluateBenchmarkStageSettings, policy: dict[str, Any], processes: int = 1
) -> list[LiberoResult]:
    (kind,) = policy
    policy[kind]["conventions"] = chosen.benchmark.conventions.model_dump(mode="json")
    for name in ("policy", "out"):
        (folder / name).mkdir(parents=True)
    where = context(folder, Events(), environments=processes, threads=1)
    POLICY_STAGE.run(RobotPolicySettings.model_validate(policy), {}, folder / "policy", where)
    inputs = {"policy": Artifact(kind="policy", path=folder / "policy", digest="d")}
    EVALUATE_BENCHMARK_STAGE.run(chosen, inputs, folder / "out", where)
    return read_results(folder / "out")


@pytest.mark.timeout(600)
def test_scripted_policies_play_as_without_a_server(expert, tmp_path):
    here = []
    for task in TASKS:
        here += json.loads(in_simulator("play", task, EPISODES, SEED, STEPS).splitlines()[-1])
    wanted = [(each["success"], [number for action in each["actions"] for number in action]) for each in here]
    assert [success for success, _ in wanted] == [True] * 2 + [False] * 2  # the peg takes more actions than allowed
    policy = {"server": {"url": expert, "weights": "scripted", "camera_fields": ["observation/image"]}}
    results = evaluate(tmp_path / "one", settings(), policy)
    assert [(result.success, list(result.actions)) for result in results] == wanted
    assert evaluate(tmp_path / "two", settings(), policy, processes=2) == results


def test_lerobot_policy_gets_the_observation_that_meta_world_makes(tmp_path):
    chosen = settings(state=4, tasks=("reach-v3",), episodes_per_task=1, max_steps=4, n_action_steps=4)
    in_simulator("see", "reach-v3", SEED, SIDE_OF_IMAGES, tmp_path / "seen.npz")
    seen = np.load(tmp_path / "seen.npz")
    (planned,) = planned_episodes("metaworld", chosen.evaluation)
    np.savez(
        tmp_path / "observations.npz",
        cameras=["observation.image"],
        state=seen["state"][None],
        seeds=[noise_seed(chosen.evaluation, planned, 0)],
        tasks=["Reach a goal position"],
        action_dimensions=4,
        **{"observation.image": seen["image"][None]},
    )
    policy, answer = tmp_path / "checkpoint", tmp_path / "answer.npy"
    with side("external_side.py", tmp_path / "log") as ask:
        ask("make", "act", policy, tmp_path / "observations.npz", answer)
    (result,) = evaluate(tmp_path / "run", chosen, {"lerobot": {"path": str(policy)}})
    assert result.failure is None and result.steps == 4
    assert np.array(result.actions, np.float32).reshape(4, 4).tolist() == np.load(answer)[0].tolist()


def in_simulator(*arguments: object) -> str:
    """Run the side of the simulator and return what it prints."""
    command, environment = [PYTHON, SIDE, *map(str, arguments)], {"MUJOCO_GL": "egl", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
