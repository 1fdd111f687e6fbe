"""Policies that LeRobot computes: what their configuration says, and what is refused before LeRobot starts. The
interchange tests compare actions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.evaluation.robot import libero_robot, refuse_external
from armature.components.robots.policies.lerobot.process import PROCESSORS, PYTHON, LeRobotPolicy, lerobot_facts
from armature.components.robots.policies.settings import LeRobotPolicySettings, RobotPolicySettings
from armature.components.robots.policies.source import policy_source, read_settings
from armature.components.robots.policies.stage import POLICY_STAGE, policy_sources
from tests.refusals import refused
from tests.robots.evaluation.playground import settings
from tests.robots.evaluation.test_stage import SIMULATOR, Events, context
from tests.robots.server.openpi import LIBERO

IMAGE = {"type": "VISUAL", "shape": [3, 32, 32]}
INPUTS: dict[str, Any] = {
    "observation.state": {"type": "STATE", "shape": [8]},
    "observation.images.image": IMAGE,
    "observation.images.wrist_image": IMAGE,
    "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 480, 640]},
}


def written(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint's configuration as LeRobot does; None removes a value."""
    config: dict[str, Any] = {
        "type": "act",
        "n_obs_steps": 1,
        "chunk_size": 10,
        "n_action_steps": 4,
        "input_features": INPUTS,
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))
    (folder / "model.safetensors").write_bytes(bytes(8))
    for name in PROCESSORS:
        (folder / name).write_text(json.dumps({"steps": [{"registry_name": "device_processor"}]}))
    return folder


def lerobot(folder: Path) -> LeRobotPolicySettings:
    return LeRobotPolicySettings(path=str(folder), conventions=LIBERO, timeout_s=60.0)


def test_configuration_of_a_checkpoint(tmp_path):
    facts = lerobot_facts(written(tmp_path))
    assert list(facts.cameras) == ["observation.images.image", "observation.images.wrist_image"]
    assert (facts.kind, facts.state_dimensions, facts.action_dimensions) == ("act", 8, 7)
    assert (facts.n_action_steps, facts.most_action_steps) == (4, 10)


@pytest.mark.parametrize(
    ("changes", "code", "shown"),
    [
        ({"type": None}, "lerobot_config_invalid", "type"),
        ({"input_features": {"observation.images.image": IMAGE}}, "lerobot_config_invalid", "observation.state"),
        ({"output_features": []}, "lerobot_config_invalid", "config.json"),
        ({"n_action_steps": "many"}, "lerobot_config_invalid", "many"),
        ({"n_obs_steps": 2}, "lerobot_policy_unsupported", "n_obs_steps is 2"),
        ({"temporal_ensemble_coeff": 0.01}, "lerobot_policy_unsupported", "temporal_ensemble_coeff is 0.01"),
    ],
)
def test_rejects_configurations(tmp_path, changes, code, shown):
    with refused(code, shown):
        lerobot_facts(written(tmp_path, **changes))


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(
    "steps",
    [
        [{"registry_name": "device_processor"}, {"class": "subprocess.Popen", "config": {"args": ["touch", "x"]}}],
        [{"registry_name": "normalizer_processor", "state_file": "../weights.safetensors"}],
        [{"registry_name": "normalizer_processor", "state_file": "/weights.safetensors"}],
        [{"registry_name": None}],
        {"registry_name": "device_processor"},
        None,
    ],
    ids=["code", "folder-above", "absolute", "unnamed", "not-a-list", "missing"],
)
def test_processors_with_other_code_or_files_are_refused(tmp_path, name, steps):
    folder = written(tmp_path)
    (folder / name).write_text(json.dumps({"steps": steps}))
    with refused("lerobot_step_refused", folder / name):
        lerobot_facts(folder)


SMALL = {**INPUTS, "observation.state": {"type": "STATE", "shape": [6]}}
SWAPPED = {name: INPUTS[name] for name in reversed(INPUTS)}
LARGE = {**INPUTS, "observation.images.image": {"type": "VISUAL", "shape": [3, 256, 256]}}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"input_features": SMALL}, "state_dimensions is 6"),
        ({"output_features": {"action": {"type": "ACTION", "shape": [14]}}}, "action_dimensions is 14"),
        ({"input_features": SWAPPED}, "cameras is observation.images.wrist_image, observation.images.image"),
        ({"input_features": LARGE}, "images is (3, 256, 256)"),
    ],
    ids=["state", "actions", "cameras", "resolution"],
)
def test_configuration_that_contradicts_the_simulator_is_refused(tmp_path, changes, shown):
    robot, plan = libero_robot(SIMULATOR), settings()
    refuse_external(lerobot(written(tmp_path)), robot, plan)
    with refused("conventions_disagree", shown):
        refuse_external(lerobot(written(tmp_path, **changes)), robot, plan)


def test_policy_stage_refers_to_the_folder_by_its_content(tmp_path):
    policy = RobotPolicySettings(lerobot=lerobot(written(tmp_path / "saved")))
    assert policy_source(policy) == str(tmp_path / "saved")
    before, out = policy_sources(policy, {}), tmp_path / "out"
    out.mkdir()
    POLICY_STAGE.run(policy, {}, out, context(tmp_path, Events()))
    assert read_settings(out) == policy and (out / "source.json").is_file()
    written(tmp_path / "saved", chunk_size=12)
    assert before != policy_sources(policy, {})
    with refused("lerobot_folder_missing", "nowhere"):
        policy_source(RobotPolicySettings(lerobot=lerobot(tmp_path / "nowhere")))


def test_interpreter_and_number_of_actions_are_checked_before_the_process_starts(tmp_path, monkeypatch):
    folder = written(tmp_path)
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    with refused("lerobot_missing", PYTHON, tmp_path / "python"):
        LeRobotPolicy(lerobot(folder), folder, None, rows=1, threads=1)
    with refused("chunk_too_short", 11, 10):
        LeRobotPolicy(lerobot(folder), folder, 11, rows=1, threads=1)


def test_errors_of_the_process_name_the_checkpoint(tmp_path, monkeypatch):
    """This environment has no LeRobot, and the weights are no weights."""
    folder = written(tmp_path)
    monkeypatch.setenv(PYTHON, sys.executable)
    pixels = np.zeros((32, 32, 3), np.uint8)
    images = {"observation.images.image": pixels, "observation.images.wrist_image": pixels}
    seen = RobotObservation(images, np.zeros(8, np.float32), "wait")
    with LeRobotPolicy(lerobot(folder), folder, None, rows=1, threads=1) as policy, refused("worker_failed") as caught:
        policy.predict([seen], [0])
    assert caught.value.where == f"policy.lerobot.path, {folder}" and "pretrained_model" in caught.value.remedy
