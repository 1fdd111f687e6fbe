"""kill -9 of the model server, of the trainer and of the run itself, at random moments: nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import CONFIGS, load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine
from armature.components.models.settings import ModelSettings
from armature.components.rollouts.batches.ratios import ratios_file, read_log_ratios
from armature.components.rollouts.table import read_rollouts
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from armature.components.vlm.settings import TrainerSettings
from armature.drill.faults import MARK
from tests.chaos.colors import processes_of
from tests.conftest import SharedServer

STEPS, GROUPS, MEMBERS = 10, 4, 4
EVERY, HELDOUT = 5, 48
OVERRIDES = (
    f"trainer.max_steps={STEPS}",
    "trainer.save_every=3",
    f"rollouts.groups_per_step={GROUPS}",
    f"rollouts.group_size={MEMBERS}",
    "batches.skip_zero_advantage=false",
    "preflight.groups=2",
    f"evaluation.every={EVERY}",
    f"evaluation.heldout_tasks={HELDOUT}",
    "model.tiny.format.steps=20",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Run:
    """A run of the stage train-vlm in a process of its own. After a kill, `start` continues it in a new process."""

    def __init__(self, folder: Path, staleness: int, in_flight: bool) -> None:
        self.folder, self.log, self.staleness = folder, folder / "run.log", staleness
        self.store = ArtifactStore(folder / "store")
        self.overrides = (
            *OVERRIDES,
            f'machine.store="{folder / "store"}"',
            f"rollouts.max_staleness={staleness}",
            f"rollouts.in_flight_updates={str(in_flight).lower()}",
        )
        recipe = load_recipe("train-vlm/colors", self.overrides)
        machine = recipe.sections["machine"]
        assert isinstance(machine, Machine)
        self.inputs = {
            stage: run_stage(stage, recipe.settings_for(STAGES[stage].settings), {}, machine).path
            for stage in ("tasks", "model")
        }

    def start(self, *machine: str) -> subprocess.Popen[bytes]:
        sets = [part for override in self.overrides for part in ("--set", override)]
        sets += [part for override in machine for part in ("--machine", override)]
        arguments = [part for name, path in self.inputs.items() for part in ("--input", f"{name}={path}")]
        config = CONFIGS / "train-vlm/colors.toml"
        command = [sys.executable, "-m", "armature", "stage", "train-vlm", "--config", str(config), *sets, *arguments]
        with self.log.open("ab") as log:
            out = ["--out", str(self.folder / "train-vlm")]
            environment = os.environ | {MARK: str(self.folder)}
            return subprocess.Popen([*command, *out], env=environment, stdout=log, stderr=log, start_new_session=True)

    def evaluations_begun(self) -> int:
        return len(re.findall(rf"^evaluation \d+/{HELDOUT}", self.log.read_text(errors="replace"), re.MULTILINE))

    def evaluated(self) -> list[int]:
        """Return the steps after which the held-out set was played."""
        return sorted(int(folder.name[-5:]) for folder in (self.folder / "store/evaluations").glob("*-?????"))

    def history(self) -> list[int]:
        """Return the steps in the run's history, in order. A step that was repeated after a kill occurs repeatedly."""
        files = list((self.folder / "store/workspaces").glob("train-vlm-*/history.jsonl"))
        lines = files[0].read_text().splitlines() if files else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for_step(run: Run, process: subprocess.Popen[bytes], step: int) -> None:
    while step not in run.history():
        assert process.poll() is None, run.log.read_text()[-4000:]
        time.sleep(0.05)


@pytest.fixture(scope="module", params=[(1, False), (2, True)], ids=["overlapped", "in_flight"])
def killed_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_server: SharedServer
) -> Run:
    """A finished run that was disturbed. First its server and then its trainer were killed, each at a random time. Then
    all of its processes were killed during an evaluation, and it was started again.

    After that it joined a running server: the servers belong to the machine's settings, which may change within a run.
    """
    seed = int(os.environ.get("ARMATURE_KILL_SEED", random.randrange(1000)))
    print(f"ARMATURE_KILL_SEED={seed}")
    run, rng = Run(tmp_path_factory.mktemp("killed"), *request.param), random.Random(seed)
    process = run.start()
    wait_for_step(run, process, 1)
    time.sleep(rng.uniform(0, 0.3))
    processes_of(str(run.folder), "server")[0].kill()
    wait_for_step(run, process, 2)
    time.sleep(rng.uniform(0, 0.3))
    processes_of(str(run.folder), "rank")[0].kill()
    wait_for_step(run, process, EVERY - 1)
    played = run.evaluations_begun()
    while run.evaluations_begun() == played:
        assert process.poll() is None, run.log.read_text()[-4000:]
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    orphans = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert run.evaluated() == [0] and max(run.history()) == EVERY - 1, "the evaluation was over"
    _, alive = psutil.wait_procs(orphans, timeout=15)
    assert not alive, "child programs outlived the run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", shared_server.key)
        assert run.start(f'servers.endpoints=["{shared_server.url}"]').wait() == 0, run.log.read_text()[-4000:]
    return run


def test_every_planned_rollout_exists_exactly_once(killed_run):
    saved: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        (folder,) = (killed_run.folder / "store/rollouts").glob(f"*-{step:05d}")
        outputs = read_rollouts(folder)
        saved.update(trajectory.trajectory_id for trajectory in outputs.trajectories)
        saved.update(failure.trajectory_id for failure in outputs.failures)
        assert not outputs.failures
    assert set(saved.values()) == {1}
    assert saved.total() == STEPS * GROUPS * MEMBERS


def test_history_has_every_step_exactly_once(killed_run):
    history = json.loads((killed_run.folder / "train-vlm/history.json").read_text())
    assert [row["step"] for row in history] == list(range(STEPS + 1))
    assert all(row["policy_version/min"] >= row["step"] - 1 - killed_run.staleness for row in history[1:])
    assert all(row["samples/count"] == row["rollouts/planned"] == GROUPS * MEMBERS for row in history[1:])


def test_killed_evaluation_is_complete_and_played_once(killed_run):
    assert killed_run.evaluated() == [0, EVERY, STEPS]
    for folder in (killed_run.folder / "store/evaluations").glob("*-?????"):
        outputs = read_rollouts(folder)
        assert len({each.task_id for each in outputs.trajectories}) == len(outputs.trajectories) == HELDOUT
        assert {turn.policy_version for each in outputs.trajectories for turn in each.turns} == {int(folder.name[-5:])}


def test_lineage_names_existing_artifacts(killed_run):
    lineage = json.loads((killed_run.folder / "train-vlm/lineage.json").read_text())
    assert [row["step"] for row in lineage if "evaluation" in row] == [0, EVERY, STEPS]
    for row in lineage:
        for kind in {"rollouts", "batch", "evaluation"} & set(row):
            result = killed_run.store.find_digest(row[kind])
            assert result is not None and result.digest == row[kind]


def test_killed_run_has_the_uninterrupted_weights(killed_run, tmp_path):
    sections = load_recipe("train-vlm/colors", killed_run.overrides).sections
    machine, model, trainer = sections["machine"], sections["model"], sections["trainer"]
    assert isinstance(machine, Machine) and isinstance(model, ModelSettings) and isinstance(trainer, TrainerSettings)
    policy = TrainerPolicySettings(
        model_path=killed_run.inputs["model"],
        model=model,
        trainer=trainer,
        temperature=1.0,
        images=killed_run.store.images,
    )
    best = json.loads((killed_run.folder / "train-vlm/metrics.json").read_text())["best/step"]
    with TrainerClient(policy, machine, tmp_path / "trainer") as client:
        for step in range(STEPS + 1):
            if step:
                (folder,) = (killed_run.folder / "store/batches").glob(f"*-{step:05d}")
                client.step(step, folder, ratios_file(tmp_path, step))
            if step in (best, STEPS):
                client.publish(tmp_path / f"{step:06d}", step)
    (workspace,) = (killed_run.folder / "store/workspaces").glob("train-vlm-*")
    made = {best: killed_run.folder / "train-vlm/checkpoint", STEPS: workspace / f"weights/{STEPS:06d}"}
    for step, folder in made.items():
        straight = load_file(tmp_path / f"{int(step):06d}/model.safetensors")
        resumed = load_file(folder / "model.safetensors")
        assert straight.keys() == resumed.keys()
        assert all(straight[name].equal(resumed[name]) for name in straight)
    for step in range(1, STEPS + 1):
        saved, expected = (read_log_ratios(ratios_file(each, step)) for each in (workspace, tmp_path))
        assert saved.keys() == expected.keys() and len(saved) == GROUPS * MEMBERS
        assert all(saved[name].tobytes() == expected[name].tobytes() for name in saved)
