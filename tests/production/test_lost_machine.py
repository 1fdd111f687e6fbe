"""The machine of a run is gone in mid-training, and another one, which shares nothing with it but the platform and the
remote store, takes the run up: it ends with the weights of an undisturbed run."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from armature.components.artifacts.manifest import read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import CONFIGS
from armature.components.contracts.stages import Artifact
from armature.components.machine.process import Program
from armature.components.rollouts.table import read_rollouts
from tests.production.conftest import Platform
from tests.production.nodes import Network, Node, wait_for
from tests.production.services import OFFLINE, ONE_THREAD

STEPS, SAVE_EVERY, GROUPS, MEMBERS, HELDOUT = 18, 6, 16, 8, 64
TASKS = ("environment.train_tasks=256", f"environment.heldout_tasks={HELDOUT}")
VALUES = (
    *TASKS,
    f"trainer.max_steps={STEPS}",
    f"trainer.save_every={SAVE_EVERY}",
    f"rollouts.groups_per_step={GROUPS}",
    f"rollouts.group_size={MEMBERS}",
    "preflight.groups=2",
)
RECIPE, CANDIDATE = "train-vlm/colors", "models:/train-vlm.colors@candidate"
CURVES = """
from mlflow import MlflowClient

client = MlflowClient()
experiment = client.get_experiment_by_name("train-vlm").experiment_id
runs = client.search_runs([experiment], "tags.`armature.stage` = 'train-vlm' and attributes.status = 'FINISHED'")
print([[point.step for point in client.get_metric_history(run.info.run_id, "reward")] for run in runs])
"""
"""Program that prints the steps of the reward curve of each finished training in MLflow."""
STATUSES = """
from mlflow import MlflowClient

client = MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("train-vlm").experiment_id])
print(sorted(f"{run.data.tags.get('armature.stage', 'flow')} {run.info.status}" for run in runs))
"""
"""Program that prints the final status of each flow and stage in MLflow."""

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class WorkerNode:
    """A node with a Prefect worker and with a local store of its own, which is empty at first."""

    node: Node
    worker: Program

    @property
    def store(self) -> Path:
        return self.node.folder / ".armature/store"

    def said(self) -> str:
        assert self.worker.log is not None
        return self.worker.log.read_text(errors="replace")

    def steps_done(self) -> int:
        histories = list(self.store.glob("workspaces/train-vlm-*/history.jsonl"))
        lines = histories[0].read_text().splitlines() if histories else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def has_sent_a_checkpoint(self) -> bool:
        """Return True if the node has sent its first checkpoint to the remote store, and has then done another step."""
        return self.steps_done() > SAVE_EVERY and f"sent the checkpoint of step {SAVE_EVERY} to" in self.said()

    def made(self, stage: str) -> Artifact:
        """Return the only artifact of `stage` in the node's store."""
        (result,) = [artifact for artifact in ArtifactStore(self.store) if artifact.kind == stage]
        return result

    def rollouts(self) -> dict[str, str]:
        """Return the digest of each step's rollouts in the node's store, by the artifact's folder name."""
        return {each.path.name: each.digest for each in ArtifactStore(self.store) if each.kind == "rollouts"}


@dataclass(frozen=True)
class TakenUp:
    """A run that two nodes have made. It began on the node `lost`, which was killed, and was continued by the node
    `taker`.

    The programs `first` and `second` submitted it and watched it.
    """

    lost: WorkerNode
    first: Program
    taker: WorkerNode
    second: Program

    @property
    def trained(self) -> Path:
        return self.taker.made("train-vlm").path


def add(network: Network, platform: Platform, name: str) -> WorkerNode:
    node = network.add(name)
    worker = platform.start_worker(node)
    wait_for(lambda: "started!" in worker.tail(), worker)
    return WorkerNode(node, worker)


def submit(platform: Platform, name: str, *values: str, log: str) -> Program:
    """Submit the deployment `name` and watch the run. The returned program ends with the run, and with its result."""
    sets = [f"--set={value}" for value in values]
    command = ["python", "-m", "armature", "submit", name, *sets, "--machine=remote_store=s3://artifacts", "--watch"]
    return platform.node.start(command, platform.environment, log)


def weights(trained: Path) -> str:
    return sha256((trained / "checkpoint/model.safetensors").read_bytes()).hexdigest()


def played(store: Path, trained: Path) -> list[tuple[Any, ...]]:
    """Return the step, trajectory id, task id, reward and sampled token ids of each rollout in the training's
    lineage."""
    result: list[tuple[Any, ...]] = []
    for row in json.loads((trained / "lineage.json").read_text()):
        rollouts = ArtifactStore(store).find_digest(row["rollouts"])
        assert rollouts is not None
        outputs = read_rollouts(rollouts.path)
        assert not outputs.failures
        for each in outputs.trajectories:
            sampled = [list(turn.completion_token_ids) for turn in each.turns]
            result.append((row["step"], each.trajectory_id, each.task_id, each.reward, sampled))
    return result


@pytest.fixture(scope="module")
def taken_up(network: Network, platform: Platform) -> TakenUp:
    lost = add(network, platform, "a")
    first = submit(platform, RECIPE, *VALUES, log="first.log")
    wait_for(lost.has_sent_a_checkpoint, first, 600)
    network.unplug(lost.node)
    lost.node.kill()
    began = time.monotonic()
    assert lost.steps_done() < STEPS, "it was not in mid-training"
    taker = add(network, platform, "b")
    second = submit(platform, RECIPE, *VALUES, log="second.log")
    wait_for(lambda: "resuming after step" in taker.said(), second, 600)
    print(f"lost after {lost.steps_done()} of {STEPS} steps; taken up {time.monotonic() - began:.0f} s later", end="")
    assert second.wait(900) == 0, second.tail(100)
    print(f", finished and evaluated {time.monotonic() - began:.0f} s later")
    return TakenUp(lost, first, taker, second)


@pytest.fixture(scope="module")
def undisturbed(network: Network, platform: Platform) -> Iterator[Node]:
    """A node that ran the same stages by single commands, without the platform and without a remote store. Its folder
    `trained` has the training's result."""
    node = network.add("undisturbed")
    platform.add_servers(node)
    command = ["python", "-m", "armature", "stage"]
    more = [f"--config={CONFIGS / RECIPE}.toml", *(f"--set={value}" for value in VALUES)]
    began = time.monotonic()
    for name in ("tasks", "model"):
        node.run([*command, name, *more, f"--out={name}"], {**ONE_THREAD, **OFFLINE})
    arguments = ["--input=tasks=tasks", "--input=model=model", "--out=trained"]
    node.run([*command, "train-vlm", *more, *arguments], {**ONE_THREAD, **OFFLINE}, 900)
    print(f"trained undisturbed in {time.monotonic() - began:.0f} s")
    yield node
    node.stop()


def test_second_machine_resumes_from_the_newest_sent_checkpoint(taken_up: TakenUp) -> None:
    output, name = taken_up.taker.said(), f"train-vlm-{taken_up.trained.name}"
    assert re.search(rf"process \d+ on a since \S+ has begun the same work \({name}\)", output)
    (fetched,) = re.findall(r"fetched the checkpoint of step (\d+) from", output)
    (resumed,) = re.findall(r"resuming after step (\d+)", output)
    assert fetched == resumed and int(resumed) in range(SAVE_EVERY, STEPS, SAVE_EVERY)


def test_every_planned_rollout_exists_exactly_once(taken_up: TakenUp, undisturbed: Node) -> None:
    result = played(taken_up.taker.store, taken_up.trained)
    assert len({trajectory for _, trajectory, *_ in result}) == len(result) == STEPS * GROUPS * MEMBERS
    assert result == played(undisturbed.folder / ".armature/store", undisturbed.folder / "trained")


def test_sent_rollouts_are_not_played_again(taken_up: TakenUp) -> None:
    """Their tables say how long each answer took: two that were played are never equal."""
    before, after = taken_up.lost.rollouts(), taken_up.taker.rollouts()
    assert len(before) > SAVE_EVERY and len(after) == STEPS
    assert all(after[name] == before[name] for name in sorted(before)[:SAVE_EVERY])


def test_resumed_run_has_the_undisturbed_weights(taken_up: TakenUp, undisturbed: Node) -> None:
    assert weights(taken_up.trained) == weights(undisturbed.folder / "trained")


def test_mlflow_has_the_complete_curve(taken_up: TakenUp, platform: Platform) -> None:
    (curve,) = json.loads(platform.node.run(["python", "-c", CURVES], platform.environment))
    assert sorted(set(curve)) == list(range(1, STEPS + 1))


def test_mlflow_shows_the_lost_run_as_killed(taken_up: TakenUp, platform: Platform) -> None:
    """The run that was on the lost machine and its training, and no other."""
    assert taken_up.second.returncode == 0
    statuses = ast.literal_eval(platform.node.run(["python", "-c", STATUSES], platform.environment))
    assert [each for each in statuses if not each.endswith("FINISHED")] == ["flow KILLED", "train-vlm KILLED"]


def test_prefect_shows_the_lost_run_as_crashed(taken_up: TakenUp) -> None:
    assert taken_up.first.wait(300) == 1
    assert "No heartbeat for 120 s" in taken_up.first.tail()


def test_third_machine_evaluates_the_candidate(taken_up: TakenUp, network: Network, platform: Platform) -> None:
    """Its store is empty, and the machine that trained is off."""
    trained = taken_up.taker.made("train-vlm")
    assert CANDIDATE in taken_up.second.tail()
    taken_up.taker.node.stop()
    third = add(network, platform, "c")
    began = time.monotonic()
    evaluation = submit(platform, "evaluate/vlm", *TASKS, "evaluation.seed=1", log="evaluation.log")
    assert evaluation.wait(600) == 0, evaluation.tail(100)
    print(f"evaluated by its alias in {time.monotonic() - began:.0f} s")
    manifest, fetched = read_manifest(third.made("evaluate").path), third.made("train-vlm")
    assert manifest.inputs["model"] == fetched.digest == trained.digest
    assert weights(fetched.path) == weights(trained.path)
    assert manifest.rows["episodes"] == HELDOUT
