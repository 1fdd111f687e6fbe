"""A trainer of two processes makes the steps of one, also where a step has fewer answers than there are processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.artifacts.images import ImageStore
from components.contracts.machine import Machine
from components.policies.molmoact2.policy import open_policy
from components.vla_rl.batch import build_batch
from components.vla_rl.client import RobotRLTrainerClient, RobotRLTraining
from components.vla_rl.collect import Collector
from components.vla_rl.schedule import plan_step
from components.vla_rl.settings import GAE, RobotRLTrainerSettings
from components.vla_rl.table import write_batch
from tests.evaluation.libero.playground import TASKS
from tests.vla_rl.kitchen import Kitchen, calm_policy, rollout_settings

pytestmark = pytest.mark.slow

TRAINER = RobotRLTrainerSettings.model_validate(
    {
        "max_steps": 2,
        "micro_batch_size": 4,
        "learning_rates": {"action_expert": 1e-3},
        "advantage": {"name": "gae", "value_lr": 1e-2},
    }
)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy`, `images` and the batches of two steps, 1 and 2, the second with one answer."""
    folder = tmp_path_factory.mktemp("batches")
    calm_policy(folder / "policy")
    policy, plan = open_policy(folder / "policy", "continuous", rows=1), rollout_settings()
    policy.add_value_head(0)
    collector = Collector(plan, policy, [Kitchen()], ImageStore(folder / "images"), lambda done, total: None)
    answers = collector.collect(plan_step(plan, TASKS, 1), 1, 0, bootstrap=True)
    assert isinstance(TRAINER.advantage, GAE)
    samples = build_batch(answers, TRAINER.advantage).samples
    for name, chosen in (("1", samples), ("2", samples[:1])):
        (folder / name).mkdir()
        write_batch(folder / name, chosen)
    return folder


def train(batches: Path, folder: Path, processes: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    training = RobotRLTraining(
        trainer=TRAINER,
        rollouts=rollout_settings(),
        policy=batches / "policy",
        images=batches / "images",
        fingerprint="f",
    )
    machine = Machine(trainer_processes=processes, threads=1, ready_timeout=300, train_timeout=300)
    with RobotRLTrainerClient(training, machine, folder / "work") as trainer:
        metrics = [trainer.step(step, batches / str(step)) for step in (1, 2)]
        trainer.publish(folder / "made", 2)
    files = ("model.safetensors", "value_head.safetensors")
    return metrics, {name: value for file in files for name, value in load_file(folder / "made" / file).items()}


def test_two_ranks_make_the_steps_of_one(batches: Path, tmp_path: Path) -> None:
    (alone, expected), (shared, found) = (train(batches, tmp_path / str(count), count) for count in (1, 2))
    for one, two in zip(alone, shared, strict=True):
        assert one.keys() == two.keys()
        for name in ("loss", "importance_ratio", "value/loss", "value/clipped_fraction", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert expected["value_head.layers.4.bias"].any()
