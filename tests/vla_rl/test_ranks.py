"""A trainer of two processes makes the steps of one, also where a step has fewer answers than there are processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.artifacts.images import ImageStore
from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.policies.molmoact2.policy import open_policy
from components.training.ranks import Ranks
from components.training.service_settings import service_settings
from components.vla_rl.batch import build_batch
from components.vla_rl.client import RobotRLTrainerClient, RobotRLTraining
from components.vla_rl.collect import Collector
from components.vla_rl.schedule import plan_step
from components.vla_rl.settings import GAE, RobotRLTrainerSettings
from components.vla_rl.table import write_batch
from components.vla_rl.worker import RobotRLWorker
from tests.evaluation.libero.playground import TASKS
from tests.vla_rl.kitchen import Kitchen, calm_policy, rollout_settings
from tests.vla_rl.test_run import InProcessTrainer

pytestmark = pytest.mark.slow

PPO: dict[str, Any] = {"advantage": {"name": "gae", "value_lr": 1e-2}}
LORA: dict[str, Any] = PPO | {
    "mode": "lora",
    "lora": {"rank": 2, "dropout": 0.0},
    "bc_coefficient": 0.5,
    "ratio": "dimension",
}


def settings(**changes: Any) -> RobotRLTrainerSettings:
    rates = dict.fromkeys(("vlm", "vit", "connector", "action_expert"), 1e-3)
    values = {"max_steps": 2, "micro_batch_size": 4, "learning_rates": rates, "adam_epsilon": 1e-3}
    return RobotRLTrainerSettings.model_validate(values | changes)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy`, `images` and the batches of two steps, 1 and 2, the second with one answer."""
    folder = tmp_path_factory.mktemp("batches")
    calm_policy(folder / "policy")
    policy, plan = open_policy(folder / "policy", "continuous", rows=1), rollout_settings()
    policy.add_value_head(0)
    collector = Collector(plan, policy, [Kitchen()], ImageStore(folder / "images"), lambda done, total: None)
    answers = collector.collect(plan_step(plan, TASKS, 1), 1, 0, bootstrap=True)
    samples = build_batch(answers, GAE(name="gae")).samples
    for name, chosen in (("1", samples), ("2", samples[:1])):
        (folder / name).mkdir()
        write_batch(folder / name, chosen)
    return folder


def training(batches: Path, trainer: RobotRLTrainerSettings) -> RobotRLTraining:
    return RobotRLTraining(
        trainer=trainer,
        rollouts=rollout_settings(),
        policy=batches / "policy",
        images=batches / "images",
        fingerprint="f",
    )


def machine(**changes: Any) -> Machine:
    return Machine(threads=1, ready_timeout=300, train_timeout=300, **changes)


def train(
    batches: Path, folder: Path, client: RobotRLTrainerClient
) -> tuple[list[dict[str, float]], list[float], dict[str, torch.Tensor]]:
    """The metrics of both steps, the second of which is resumed from a checkpoint where there are processes to restart;
    scores of the first batch in between; and the weights."""
    metrics, restarts = [client.step(1, batches / "1")], not isinstance(client, InProcessTrainer)
    if restarts:
        client.save()
        client.settle()
        client.restart()
        assert client.resume() == 1
    scores = client.score(batches / "1")
    metrics.append(client.step(2, batches / "2"))
    client.publish(folder / "made", 2)
    files = ("model.safetensors", "value_head.safetensors")
    return metrics, scores, {name: value for file in files for name, value in load_file(folder / "made" / file).items()}


@pytest.mark.parametrize(("changes", "sharding"), [(PPO, None), (LORA, "full")], ids=["copies", "sharded-lora"])
def test_two_ranks_make_the_steps_of_one(changes: dict[str, Any], sharding: Any, batches: Path, tmp_path: Path) -> None:
    job, several = training(batches, settings(**changes)), machine(trainer_processes=2, trainer_sharding=sharding)
    one_process = InProcessTrainer(job, machine(), tmp_path / "1/work")
    alone, told, expected = train(batches, tmp_path / "1", one_process)
    with RobotRLTrainerClient(job, several, tmp_path / "2/work") as client:
        shared, heard, found = train(batches, tmp_path / "2", client)
    for one, two in zip(alone, shared, strict=True):
        assert one.keys() == two.keys()
        names = {"loss", "importance_ratio", "value/loss", "value/clipped_fraction", "grad_norm", "bc/loss"}
        for name in names & set(one):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert heard == pytest.approx(told, rel=1e-4) and len(told) > 8
    assert expected.keys() == found.keys()
    before = load_file(batches / "policy/checkpoint/model.safetensors")
    changed = set()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5, msg=name)
        if name in before and not torch.equal(before[name], value):
            changed.add("expert" if "action_expert" in name else "vlm")
    assert changed == ({"expert", "vlm"} if changes is LORA else {"expert"})
    assert expected["value_head.layers.4.bias"].any()


def test_what_a_split_policy_cannot_keep_is_refused(batches: Path, tmp_path: Path) -> None:
    job = training(batches, settings(kl_coefficient=0.1))
    several = machine(trainer_processes=2, trainer_sharding="full")
    with pytest.raises(ConfigurationError, match="no copy of its start"):
        RobotRLWorker(service_settings(job, several, tmp_path), Ranks())
