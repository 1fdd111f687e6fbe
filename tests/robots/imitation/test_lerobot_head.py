"""MolmoAct2 trains and acts as LeRobot's own code does since pull request 4249 (commit c13d79e6).

Updates and actions were recorded with torch 2.11 in the environment of tests/interop/lerobot, from a checkout:
python -m tests.robots.imitation.test_lerobot_head CHECKOUT/src
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.imitation.data import PolicyMicroBatch
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.opening import group_of, prepare, scheduled
from armature.components.robots.imitation.settings import VLATrainerSettings
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy, load_policy
from armature.components.robots.policies.molmoact2.checkpoints.weights import to_released
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from tests.robots.policies.molmoact2 import released

RECORDED, TESTS = Path(__file__).with_name("lerobot_head.json"), Path(__file__).parents[2]
CASES = {
    "continuous": ("continuous", "full", "float32"),
    "expert": ("continuous", "expert", "float32"),
    "both": ("both", "full", "float32"),
    "discrete": ("discrete", "full", "float32"),
    "rounded": ("both", "full", "bfloat16"),
}
"""action_mode, training.mode and dtype by name."""
PEAKS = {"vlm": 2e-3, "vit": 3e-3, "connector": 4e-3, "action_expert": 5e-3}
TRAINING = {"adam_epsilon": 1e-4, "max_grad_norm": 0.4, "warmup_steps": 2, "decay_steps": 24_000}
"""The bound on gradients clips two of the four groups."""


class TwoUpdates(NamedTuple):
    """Reports of two updates, and each weight's move, with what bfloat16 cut off.

    dtypes, moved: by released name. groups: moves of a group's weights.
    """

    reports: list[dict[str, float]]
    dtypes: dict[str, torch.dtype]
    moved: dict[str, Tensor]
    groups: dict[str, Tensor]


def write_case(folder: Path) -> dict[str, Any]:
    """Write a checkpoint and an action tokenizer. Return three examples; two of them end with their episode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(released, "DIMENSIONS", 32)  # LeRobot takes no other
        released.write_released(folder)
    ActionTokens.fit([np.zeros((4, 7))], vocabulary=released.ACTIONS, scale=10).save(folder / "action_tokenizer")
    seen, rng = [released.observe(number) for number in range(3)], np.random.default_rng(0)
    actions, valid = rng.uniform(-1.6, 1.6, (3, 4, 7)).astype(np.float32), np.array([4, 2, 1])
    padding = np.arange(4) >= valid[:, None]
    return {name: np.stack([each.images[name] for each in seen]) for name in released.CAMERAS} | {
        "cameras": np.array(released.CAMERAS),
        "state": np.stack([each.state for each in seen]),
        "task": np.array([each.task for each in seen]),
        "action": np.where(padding[..., None], actions[np.arange(3), valid - 1, None], actions),
        "action_is_pad": padding,
        "timesteps": rng.uniform(0.001, 1, (3, 2)).astype(np.float32),
        "noise": rng.normal(size=(3, 2, 4, 32)).astype(np.float32),
    }


def open_case(folder: Path, **changes: Any) -> LoadedPolicy:
    return load_policy(folder, released.KITCHEN.model_copy(update={"semantics": "head"} | changes))


def observation(examples: dict[str, Any], row: int) -> RobotObservation:
    images = {name: examples[name][row] for name in released.CAMERAS}
    return RobotObservation(images, examples["state"][row], str(examples["task"][row]))


def two_updates(folder: Path, examples: dict[str, Any], case: str) -> TwoUpdates:
    action_mode, mode, dtype = CASES[case]
    tokenizer = None if action_mode == "continuous" else str(folder / "action_tokenizer")
    loaded = open_case(folder, action_mode=action_mode, action_tokenizer=tokenizer, dtype=dtype)
    rates = {name: peak for name, peak in PEAKS.items() if mode == "full" or name == "action_expert"}
    sizes = {"mode": mode, "max_steps": 2, "batch_size": 3, "micro_batch_size": 3}
    settings = VLATrainerSettings.model_validate(TRAINING | sizes | {"learning_rates": rates})
    processor, config = loaded.processor(), loaded.config.molmo2()
    prepare(loaded.model, settings, loaded.settings.semantics)
    learner = PolicyLearner(loaded.model, settings, LossPlan.of(loaded.settings))
    targets = zip(examples["action"], examples["action_is_pad"], strict=True)
    encoded = [processor.encode(observation(examples, row), *target) for row, target in enumerate(targets)]
    draws = FlowSamples(torch.from_numpy(examples["timesteps"]), torch.from_numpy(examples["noise"]))
    micro = PolicyMicroBatch(processor.batch(encoded, None, multiple=8), draws, 1)
    weights, states = dict(learner.model.named_parameters()), learner.optimizer.state
    before = {name: p.detach().float().clone() for name, p in weights.items()}
    reports = [learner.step([micro]) for _ in range(2)]
    moved = {n: p.detach().float() + states[p].get("residual", 0.0) - before[n] for n, p in weights.items()}
    trained = [name for name, p in weights.items() if p.requires_grad]
    groups = {each: torch.cat([moved[n].flatten() for n in trained if group_of(n) == each]) for each in rates}
    dtypes = {name: p.dtype for name, p in to_released({n: p.detach() for n, p in weights.items()}, config).items()}
    return TwoUpdates(reports, dtypes, to_released(moved, config), groups)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RECORDED.read_text())
    return document


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lerobot") / "checkpoint"
    return folder, write_case(folder)


@pytest.mark.parametrize("name", ["continuous", "expert", "both", "discrete"])
def test_losses_gradient_norms_and_weights_after_two_updates_equal_lerobots(name: str, recorded, case) -> None:
    theirs, ours = recorded["cases"][name], two_updates(*case, name)
    np.testing.assert_allclose([report["loss"] for report in ours.reports], theirs["loss"], rtol=1e-5)
    for report, norms, clipped in zip(ours.reports, theirs["norms"], theirs["clipped"], strict=True):
        for group, norm in norms.items():
            assert report[f"grad_norm/{group}"] == pytest.approx(norm, rel=1e-5), group
            assert min(report[f"grad_norm/{group}"], TRAINING["max_grad_norm"]) == pytest.approx(
                clipped[group], rel=1e-5
            )
    for released_name, expected in zip(sorted(ours.moved), theirs["moved"], strict=True):
        move = ours.moved[released_name].flatten().double()
        direction = torch.arange(len(move)).double().cos()
        assert float(move @ direction / direction.norm()) == pytest.approx(expected, rel=1e-5, abs=1e-6), released_name


def test_bfloat16_updates_are_as_close_to_float32_as_lerobots(recorded, case) -> None:
    theirs, ours, exact = recorded["cases"]["rounded"], two_updates(*case, "rounded"), two_updates(*case, "both")
    assert [ours.dtypes[name] == torch.float32 for name in sorted(ours.dtypes)] == list(map(bool, theirs["float32"]))
    np.testing.assert_allclose([report["loss"] for report in ours.reports], theirs["loss"], rtol=1e-3)
    for report, norms in zip(ours.reports, theirs["norms"], strict=True):
        assert {group: report[f"grad_norm/{group}"] for group in norms} == pytest.approx(norms, rel=0.03)
    for group, distance in recorded["distances"].items():
        assert (ours.groups[group] - exact.groups[group]).norm() / exact.groups[group].norm() < 1.25 * distance, group


def test_learning_rates_equal_the_defaults_of_lerobot_with_its_clock(recorded) -> None:
    clock = {"warmup_steps": 200, "decay_steps": 24_000}
    settings = VLATrainerSettings(max_steps=10_000, batch_size=1, micro_batch_size=1, **clock)
    rates = [scheduled(peak, settings) for peak in settings.learning_rates.model_dump().values()]
    for update, expected in recorded["rates"].items():
        assert [rate(int(update)) for rate in rates] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("semantics", "checkpoint"), [("head", "continuous"), ("seed", "released")])
def test_actions_equal_lerobots(semantics: str, checkpoint: str, recorded, case) -> None:
    """LeRobot masks the context of a released checkpoint as its earlier versions do, whatever the policy trains."""
    folder, examples = case
    changes = {"semantics": semantics, "image_attention_at_inference": "bidirectional"}
    loaded = open_case(folder, **changes)
    policy = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)
    (chunk,) = policy.predict([observation(examples, 0)], [11])
    theirs = np.array(recorded["actions"][checkpoint])
    np.testing.assert_allclose(chunk[: len(theirs)], theirs, atol=1e-5)


def record(source: str) -> None:
    """Run LeRobot's half with its sources in `source`, and write the recording."""
    rates = dict(zip(("lr", "vit_lr", "connector_lr", "action_expert_lr"), PEAKS.values(), strict=True))
    rates |= {"eps": TRAINING["adam_epsilon"], "grad_clip_norm": TRAINING["max_grad_norm"]}
    common = {f"optimizer_{name}": value for name, value in rates.items()}
    common |= {"scheduler_warmup_steps": TRAINING["warmup_steps"], "norm_tag": "kitchen", "normalize_gripper": True}
    cases = {}
    for name, (action_mode, mode, dtype) in CASES.items():
        trained = {"full": "fft", "expert": "freeze"}[mode]
        cases[name] = common | {"action_mode": action_mode, "train_mode_vlm": trained, "dtype": dtype}
    with TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        examples = write_case(folder)
        np.savez(folder / "examples.npz", **examples)
        (folder / "cases.json").write_text(json.dumps(cases))
        command = [TESTS.parent / ".venv-lerobot/bin/python", TESTS / "interop/lerobot/head_side.py", folder]
        environment = os.environ | {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        RECORDED.write_bytes(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


if __name__ == "__main__":
    record(sys.argv[1])
