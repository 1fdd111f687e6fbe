"""Things that are not needed: a network for tasks, flash-attn for imports, images for rewards."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.rollouts.batches.table import build_batch
from armature.components.rollouts.settings import BatchSettings
from tests.pages.conftest import make_trajectory

REPOSITORY = Path(__file__).resolve().parents[2]

# Every Python that starts below runs this. It writes a line for each connection and each name lookup.
WATCH = """
import os, socket
def told(what):
    with open(os.environ["CONNECTIONS"], "a") as file:
        file.write(f"{what}\\n")
    raise OSError(f"no network in this test: {what}")
def watch(method):
    def call(self, address, *more):
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
            told(address)
        return method(self, address, *more)
    return call
socket.socket.connect = watch(socket.socket.connect)
socket.socket.connect_ex = watch(socket.socket.connect_ex)
resolve = socket.getaddrinfo
socket.getaddrinfo = lambda host, *a, **k: (
    resolve(host, *a, **k) if host in (None, "localhost", "127.0.0.1", "::1") else told(host)
)
"""


def test_tasks_are_made_without_network_or_dataset(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    connections = tmp_path / "connections"
    connections.touch()
    offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"}
    env = {key: value for key, value in os.environ.items() if key not in offline}
    env |= {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "CONNECTIONS": str(connections), "HF_HOME": str(tmp_path / "hub")}
    words = ["stage", "tasks", "--config", "configs/train-vlm/molmo2-text.toml", "--out", str(tmp_path / "tasks")]
    fewer = ("train_tasks=3", "heldout_tasks=2", "args.games.most_receptacles=4")
    words += [word for each in fewer for word in ("--set", f"environment.{each}")]
    words += ["--machine", f"store={tmp_path / 'store'}", "--machine", "workers.environments=1"]
    done = subprocess.run(
        [sys.executable, "-m", "armature", *words], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert connections.read_text() == ""
    assert not (tmp_path / "hub").exists() and (tmp_path / "tasks/train.parquet").exists()


def test_all_modules_import_without_flash_attn():
    """All components, that is; but for vLLM's plug-in, which is for vLLM's own environment."""
    program = """
import importlib, pkgutil, sys
sys.modules["flash_attn"] = None  # from now on importing it is an ImportError, and looking for it finds nothing
from armature import components
for module in pkgutil.walk_packages(components.__path__, "armature.components."):
    if ".served" not in module.name:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # an extra that this environment may lack
            assert error.name.partition(".")[0] in ("verifiers", "triton", "ai2thor", "alfworld"), error
assert not [name for name in sys.modules if name.startswith("flash_attn.")]
print("imported", len([name for name in sys.modules if name.startswith("armature.components.")]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 150


ADVANTAGES = {
    "group_mean": {"name": "group_mean", "scale": "group_std"},
    "rloo": {"name": "rloo"},
    "gigpo": {
        "name": "gigpo",
        "gamma": 0.95,
        "step_weight": 1.0,
        "statistics": "trajectories",
        "norm": {"name": "mean_std_norm", "std_floor": 0.5},
        "anchor": {"name": "exact"},
    },
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_and_advantages_do_not_depend_on_images(name):
    """Not their number, their size nor what a family's processor makes of them."""
    settings = BatchSettings.model_validate(
        {
            "advantage": ADVANTAGES[name],
            "penalty": {"format": 0.1, "inadmissible": 0.0},
            "skip_zero_advantage": False,
            "max_sequence_tokens": 64,
        }
    )
    shown = ImageRef("0" * 64, "image/png", 300, 300)
    metrics = [
        build_batch(GenerateOutputs([_played(index, refs) for index in range(4)]), _NoSamples(), settings).metrics
        for refs in ((), (shown,), (shown, replace(shown, width=28)))
    ]
    assert metrics[0] == metrics[1] == metrics[2] and metrics[0]["advantage/turn_absmean"] > 0


def _played(index, refs):
    trajectory = make_trajectory(f"t{index}", refs, reward=float(index), group="g")
    return replace(trajectory, turns=tuple(replace(turn, anchor_key="room") for turn in trajectory.turns))


class _NoSamples:
    """An adapter that makes no samples, so that results depend only on trajectories."""

    def samples(self, outputs, advantages=None):
        from collections import Counter

        return [], Counter()
