"""Two trainer processes make the same steps as one.

This also holds if a step has fewer chunks than processes, and if they pack rows and the single process does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.machine import Machine
from armature.components.robots.imitation.opening import GROUPS
from armature.components.robots.policies.molmoact2 import policy as policies
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import save_policy
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.rl.batch import build_batch
from armature.components.robots.rl.client import RobotRLTrainerClient, RobotRLTraining
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.settings import GAE, RobotRLTrainerSettings
from armature.components.robots.rl.table import write_batch
from armature.components.robots.rl.worker import RobotRLWorker
from armature.components.training.processes import private_folder
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import ServiceSettings, service_settings
from tests.builders import make_machine
from tests.refusals import refused
from tests.robots.evaluation.playground import TASKS
from tests.robots.rl.kitchen import Kitchen, calm_policy, rollout_settings
from tests.robots.rl.test_run import InProcessTrainer
from tests.robots.rl.test_tokens import spoken

pytestmark = pytest.mark.slow

PPO: dict[str, Any] = {"advantage": {"name": "gae", "value_lr": 1e-2}}
LORA: dict[str, Any] = PPO | {
    "mode": "lora",
    "lora": {"rank": 2},
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
    """A folder with batches of continuous actions; see `write_batches`."""
    return write_batches(tmp_path_factory.mktemp("batches"), "continuous")


def write_batches(folder: Path, mode: Mode) -> Path:
    """Write a policy, the images of its rollouts, and the batches of steps 1 and 2 to `folder`, and return it. The
    second batch has only one chunk."""
    if mode == "continuous":
        calm_policy(folder / "policy")
    else:
        loaded = spoken(folder / "policy")
        save_policy(folder / "policy/checkpoint", loaded.parts, loaded.model.state_dict())
    policy, plan = open_flow_policy(folder / "policy", mode, rows=1), rollout_settings(inference_action_mode=mode)
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
    return make_machine(threads=1, ready_timeout=300, train_timeout=300, **changes)


Trained = tuple[list[dict[str, float]], list[float], dict[str, torch.Tensor]]
"""Result of a training of two steps: the metrics of both steps, the log-probs of the first batch under the weights
after step 1, and the final weights."""


def train(batches: Path, folder: Path, client: InProcessTrainer) -> Trained:
    metrics = [client.step(1, batches / "1")]
    scores = client.score(batches / "1")
    metrics.append(client.step(2, batches / "2"))
    client.publish(folder / "made", 2)
    return metrics, scores, weights_of(folder / "made")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    files = ("model.safetensors", "value_head.safetensors")
    return {name: value for file in files for name, value in load_file(folder / file).items()}


class Forked:
    """A client of the program forked_ranks.py, which forks trainer ranks."""

    def __init__(self, log: Path, program: subprocess.Popen[str]) -> None:
        self.log, self.program = log, program

    def two_ranks(self, service: ServiceSettings, commands: list[dict[str, Any]], folder: Path) -> list[Any]:
        """Send commands to a trainer of two ranks and return its replies. `folder` is created for its files."""
        rendezvous, asked = private_folder(folder), folder / "asked.json"
        asked.write_text(json.dumps([service.model_dump(mode="json"), commands]))
        assert self.program.stdin is not None and self.program.stdout is not None
        self.program.stdin.write(json.dumps([2, str(rendezvous), str(asked)]) + "\n")
        self.program.stdin.flush()
        assert self.program.stdout.readline() == "0\n", self.log.read_text()[-6000:]
        answers: list[Any] = json.loads((folder / "answers.json").read_text())
        return answers


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    log, pipe = tmp_path_factory.mktemp("forked") / "log", subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "tests.robots.rl.forked_ranks"]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, text=True, env=environment) as program,
    ):
        yield Forked(log, program)


def train_on_two_ranks(batches: Path, folder: Path, job: RobotRLTraining, sharding: Any, forked: Forked) -> Trained:
    """Train two steps; other ranks make the second one, after resuming from a checkpoint."""
    service = service_settings(job, machine(trainer__processes=2, trainer__sharding=sharding), folder / "work")
    service.workspace.mkdir(parents=True)
    first, second = ({"name": "step", "step": step, "batch": str(batches / str(step))} for step in (1, 2))
    score = {"name": "score", "batch": str(batches / "1")}
    publish = {"name": "publish", "folder": str(folder / "made"), "version": 2}
    metrics, _, _ = forked.two_ranks(service, [first, {"name": "save"}, {"name": "settle"}], folder / "first")
    resumed, scores, last, _ = forked.two_ranks(service, [{"name": "resume"}, score, second, publish], folder / "then")
    assert resumed == 1
    return [metrics, last], scores, weights_of(folder / "made")


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
def test_two_ranks_equal_one_rank(
    changes: dict[str, Any],
    sharding: Any,
    packing: Any,
    batches: Path,
    tmp_path: Path,
    forked: Forked,
) -> None:
    one_process = InProcessTrainer(training(batches, settings(**changes)), machine(), tmp_path / "1/work")
    alone, reports, expected = train(batches, tmp_path / "1", one_process)
    job = training(batches, settings(packing=packing, **changes))
    shared, shared_reports, weights = train_on_two_ranks(batches, tmp_path / "2", job, sharding, forked)
    metrics_agree(alone, shared)
    assert shared_reports == pytest.approx(reports, rel=1e-6) and len(reports) > 8
    assert expected.keys() == weights.keys()
    before = load_file(batches / "policy/checkpoint/model.safetensors")
    changed = set()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5, msg=name)
        if name in before and not torch.equal(before[name], value):
            changed.add("expert" if "action_expert" in name else "vlm")
    assert changed == ({"expert", "vlm"} if changes is LORA else {"expert"})
    assert expected["value_head.layers.4.bias"].any()


@pytest.mark.long
def test_two_ranks_pack_action_tokens_and_shard_the_policy(tmp_path: Path) -> None:
    batches, plain = write_batches(tmp_path, "discrete"), {"mode": "full", "ratio": "token"}
    one_process = InProcessTrainer(training(batches, settings(**plain), "discrete"), machine(), tmp_path / "alone")
    job = training(batches, settings(packing=PACKING, **plain), "discrete")
    ranks = machine(trainer__processes=2, trainer__sharding="full")
    with RobotRLTrainerClient(job, ranks, tmp_path / "work") as client:
        (alone, reports), (shared, shared_reports) = (
            ([each.step(1, batches / "1")], each.score(batches / "1")) for each in (one_process, client)
        )
    metrics_agree(alone, shared)
    assert shared_reports == pytest.approx(reports, rel=1e-6)


def test_rejects_settings_that_sharding_does_not_support(batches: Path, tmp_path: Path) -> None:
    job = training(batches, settings(kl_coefficient=0.1))
    several = machine(trainer__processes=2, trainer__sharding="full")
    with refused("start_not_kept", "trainer.kl_coefficient"):
        RobotRLWorker(service_settings(job, several, tmp_path), Ranks())
    job = training(batches, settings(mode="expert", learning_rates={"action_expert": 1e-3}))
    job = job.model_copy(update={"rollouts": job.rollouts.model_copy(update={"quantization": "fp8"})})
    with refused("quantization_not_split", "rollouts.quantization"):
        RobotRLWorker(service_settings(job, several, tmp_path), Ranks())
