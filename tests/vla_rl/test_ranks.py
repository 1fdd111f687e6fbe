"""A trainer of two processes makes the steps of one, also where a step has fewer answers than there are processes, and
where they pack rows and the one does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from components.artifacts.images import ImageStore
from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.policies.molmoact2 import policy as policies
from components.policies.molmoact2.checkpoints.checkpoint import save_policy
from components.policies.molmoact2.policy import open_policy
from components.training.ranks import Ranks
from components.training.service_settings import service_settings
from components.vla.groups import GROUPS
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
from tests.vla_rl.test_tokens import spoken

pytestmark = pytest.mark.slow

PPO: dict[str, Any] = {"advantage": {"name": "gae", "value_lr": 1e-2}}
LORA: dict[str, Any] = PPO | {
    "mode": "lora",
    "lora": {"rank": 2, "dropout": 0.0},
    "bc_coefficient": 0.5,
    "ratio": "dimension",
}


PACKING = {"max_row_tokens": 1000, "max_row_examples": 3}


def settings(**changes: Any) -> RobotRLTrainerSettings:
    rates = dict.fromkeys(GROUPS if "mode" in changes else ["action_expert"], 1e-3)
    values = {"max_steps": 2, "micro_batch_size": 4, "learning_rates": rates, "adam_epsilon": 1e-3}
    return RobotRLTrainerSettings.model_validate(values | changes)


Mode = Literal["continuous", "discrete"]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of continuous actions."""
    return write_batches(tmp_path_factory.mktemp("batches"), "continuous")


def write_batches(folder: Path, mode: Mode) -> Path:
    """`policy`, `images` and the batches of two steps, 1 and 2, the second with one answer."""
    if mode == "continuous":
        calm_policy(folder / "policy")
    else:
        loaded = spoken(folder / "policy")
        save_policy(folder / "policy/checkpoint", loaded.parts, loaded.model.state_dict())
    policy, plan = open_policy(folder / "policy", mode, rows=1), rollout_settings(inference_action_mode=mode)
    policy.add_value_head(0)
    collector = Collector(plan, policy, [Kitchen()], ImageStore(folder / "images"), lambda done, total: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "TOKENS_PER_ACTION", 3)  # random weights hardly ever end their answers
        answers = collector.collect(plan_step(plan, TASKS, 1), 1, 0, bootstrap=True).answers
    samples = build_batch(answers, GAE(name="gae")).samples
    for name, chosen in (("1", samples), ("2", samples[:1])):
        (folder / name).mkdir()
        write_batch(folder / name, chosen)
    return folder


def training(batches: Path, trainer: RobotRLTrainerSettings, mode: Mode = "continuous") -> RobotRLTraining:
    return RobotRLTraining(
        trainer=trainer,
        rollouts=rollout_settings(inference_action_mode=mode),
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


def metrics_agree(alone: list[dict[str, float]], shared: list[dict[str, float]]) -> None:
    names = {"loss", "importance_ratio", "value/loss", "value/clipped_fraction", "grad_norm", "bc/loss"}
    for one, two in zip(alone, shared, strict=True):
        assert one.keys() == two.keys()
        for name in names & set(one):
            assert two[name] == pytest.approx(one[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("changes", "sharding", "packing"),
    [(PPO, None, None), (LORA, "full", PACKING)],
    ids=["copies", "sharded-lora-packed"],
)
def test_two_ranks_make_the_steps_of_one(
    changes: dict[str, Any], sharding: Any, packing: Any, batches: Path, tmp_path: Path
) -> None:
    several = machine(trainer_processes=2, trainer_sharding=sharding)
    one_process = InProcessTrainer(training(batches, settings(**changes)), machine(), tmp_path / "1/work")
    alone, told, expected = train(batches, tmp_path / "1", one_process)
    job = training(batches, settings(packing=packing, **changes))
    with RobotRLTrainerClient(job, several, tmp_path / "2/work") as client:
        shared, heard, found = train(batches, tmp_path / "2", client)
    metrics_agree(alone, shared)
    assert heard == pytest.approx(told, rel=1e-6) and len(told) > 8
    assert expected.keys() == found.keys()
    before = load_file(batches / "policy/checkpoint/model.safetensors")
    changed = set()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5, msg=name)
        if name in before and not torch.equal(before[name], value):
            changed.add("expert" if "action_expert" in name else "vlm")
    assert changed == ({"expert", "vlm"} if changes is LORA else {"expert"})
    assert expected["value_head.layers.4.bias"].any()


def test_two_ranks_pack_action_tokens_and_split_the_policy(tmp_path: Path) -> None:
    batches, plain = write_batches(tmp_path, "discrete"), {"mode": "full", "ratio": "token"}
    one_process = InProcessTrainer(training(batches, settings(**plain), "discrete"), machine(), tmp_path / "alone")
    job = training(batches, settings(packing=PACKING, **plain), "discrete")
    with RobotRLTrainerClient(job, machine(trainer_processes=2, trainer_sharding="full"), tmp_path / "work") as client:
        (alone, told), (shared, heard) = (
            ([each.step(1, batches / "1")], each.score(batches / "1")) for each in (one_process, client)
        )
    metrics_agree(alone, shared)
    assert heard == pytest.approx(told, rel=1e-6)


def test_what_a_split_policy_cannot_keep_is_refused(batches: Path, tmp_path: Path) -> None:
    job = training(batches, settings(kl_coefficient=0.1))
    several = machine(trainer_processes=2, trainer_sharding="full")
    with pytest.raises(ConfigurationError, match="no copy of its start"):
        RobotRLWorker(service_settings(job, several, tmp_path), Ranks())
    job = training(batches, settings(mode="expert", learning_rates={"action_expert": 1e-3}))
    job = job.model_copy(update={"rollouts": job.rollouts.model_copy(update={"quantization": "fp8"})})
    with pytest.raises(ConfigurationError, match="no layer computes in 8 bits"):
        RobotRLWorker(service_settings(job, several, tmp_path), Ranks())
