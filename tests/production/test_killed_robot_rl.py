"""kill -9 of a robot policy's flow while it learns by trying, of its simulators and its trainer, at random moments: its
results are those of a flow that was left alone, to the last bit. The policy that plays is in the flow's process."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from armature.drill.faults import MARK
from tests.chaos.colors import processes_of

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
"""Python interpreter of the environment in which the simulator is installed."""
STEPS, GROUPS, MEMBERS = 2, 2, 4
OVERRIDES = (
    "demonstrations.episodes_per_task=4",
    "training.max_steps=100",
    "training.warmup_steps=0",
    "training.save_every=100",
    "simulator.reach_distance=0.17",
    f"rollouts.groups_per_step={GROUPS}",
    f"rollouts.group_size={MEMBERS}",
    "rollouts.max_steps=10",  # too few to reach the bowl
    "rollouts.reward.name=progress",  # differs between all episodes, so every step has something to learn
    f"trainer.max_steps={STEPS}",
    "trainer.samples_per_update=1",
    "evaluation.episodes_per_task=2",
    "evaluation.max_steps.libero_spatial=20",
)
LEARNED = ("robot-rollouts", "robot-batches", "train-vla-rl", "evaluate-libero", "compare-libero", "workspaces")
"""Folders of the store that the flow fills from reinforcement learning on, after demonstrations and imitation."""

TABLES = "robot-*/*/*.parquet"
"""Pattern of the tables that the flow writes: the rollouts of a step and then its batch, step by step."""

FAULTS = (
    *((0, "flow"), (0, "simulator"), (1, "trainer"), (1, "simulator")),
    *((2, "flow"), (3, "trainer"), (3, "flow"), (4, "flow")),
)
KINDS = {"flow": "simulator", "simulator": "simulator", "trainer": "rank"}
"""The kind of process that has to run at the time of a fault, by the victim."""
TRAINED = ("train-vla", "train-vla-rl")

pytestmark = pytest.mark.timeout(1800)


class Flow:
    """A shortened `armature run train-vla-rl/tiny` in a folder of its own. It can be started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "run.log"
        self.store = folder / ".armature/store"
        folder.mkdir(exist_ok=True)

    def start(self) -> subprocess.Popen[bytes]:
        sets = [f"--set={override}" for override in OVERRIDES]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(self.folder)}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [PYTHON, "-m", "armature", "run", "train-vla-rl/tiny", *sets],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait() == 0, self.log.read_text(errors="replace")[-4000:]

    def files(self, pattern: str) -> dict[str, bytes]:
        """Return the contents of the files in the store that match `pattern`, by path."""
        result = sorted(path for path in self.store.glob(pattern) if path.is_file())
        return {str(path.relative_to(self.store)): path.read_bytes() for path in result}


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Flow, Flow]:
    """Two finished flows with the same demonstrations and the same imitation: an undisturbed one, and one that was
    disturbed during reinforcement learning."""
    seed = int(os.environ.get("ARMATURE_KILL_SEED", random.randrange(1000)))
    print(f"ARMATURE_KILL_SEED={seed}")
    folder = tmp_path_factory.mktemp("flows")
    alone, killed = Flow(folder / "alone"), Flow(folder / "killed")
    alone.finish(alone.start())
    shutil.copytree(alone.store, killed.store, ignore=lambda at, names: LEARNED if Path(at) == alone.store else ())
    disturb(killed, random.Random(seed))
    return alone, killed


def disturb(flow: Flow, rng: random.Random) -> None:
    """Run a flow to its end, and inflict `FAULTS` on it.

    A fault is a number of tables and a victim. The victim is killed up to 3 s after the flow has written so many
    tables; a trainer is killed within 1 s, while it certainly works. If the whole flow is killed, it is started again.
    """
    process = flow.start()
    for tables, name in FAULTS:
        while len(flow.files(TABLES)) < tables or not processes_of(str(flow.folder), KINDS[name]):
            assert process.poll() is None, flow.log.read_text(errors="replace")[-4000:]
            time.sleep(0.1)
        moment = rng.uniform(0, 1 if name == "trainer" else 3)
        time.sleep(moment)
        print(f"the {name} is killed {moment:.1f} s after {len(flow.files(TABLES))} tables were there")
        if name != "flow":
            processes_of(str(flow.folder), KINDS[name])[0].kill()
            continue
        descendants = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(descendants, timeout=30)
        assert not alive, "child programs outlived the flow"
        process = flow.start()
    flow.finish(process)


def test_training_improves_accuracy(flows: tuple[Flow, Flow]) -> None:
    alone, _ = flows
    before, after = (load_file(*alone.store.glob(f"{stage}/*/checkpoint/model.safetensors")) for stage in TRAINED)
    assert any(not after[name].equal(weights) for name, weights in before.items())


@pytest.mark.parametrize(
    "pattern",
    [
        "train-vla-rl/*/checkpoint/**/*",
        "robot-rollouts/*/rollouts.parquet",
        "robot-batches/*/batch.parquet",
        "evaluate-libero/*/results.parquet",
        "train-vla-rl/*/lineage.json",
    ],
)
def test_files_equal_those_of_an_undisturbed_flow(flows: tuple[Flow, Flow], pattern: str) -> None:
    """Artifacts by name. The fingerprint of an evaluation depends on its policy's history, which contains times."""
    alone, killed = (sorted((Path(path).name, data) for path, data in flow.files(pattern).items()) for flow in flows)
    assert alone == killed and alone


def test_history_has_every_step_exactly_once(flows: tuple[Flow, Flow]) -> None:
    histories = [json.loads(*flow.files("train-vla-rl/*/history.json").values()) for flow in flows]
    for history in histories:
        assert [row["step"] for row in history] == list(range(1, STEPS + 1))
        assert all(row["rollouts/planned"] == GROUPS * MEMBERS for row in history)
    names = ("reward", "loss", "updates", "grad_norm", "importance_ratio", "kl")
    alone, killed = ([[row.get(name) for name in names] for row in history] for history in histories)
    assert alone == killed
