"""The recipe train-vla/tiny, shortened: demonstrations, statistics, training, evaluation in LIBERO; then by DVC."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from armature.components.configuration import recipe_from_file
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.verify import bundle_evaluation, verify_bundle
from tests.end_to_end.conftest import Project, make

SHORT = """
extends = "_whole.toml"

[policy]
num_flow_timesteps = 2

[demonstrations]
episodes_per_task = 3

[training]
max_steps = 4
batch_size = 4
micro_batch_size = 4
warmup_steps = 0
heldout = { fraction = 0.3, frames = 4, every = 4 }
save_every = 4

[simulator]
resolution = 56

[evaluation]
episodes_per_task = 2
max_steps = { libero_spatial = 20 }
videos_per_task = 1

[machine]
trainer.loader_workers = 0
workers.environments = 1
"""
CHAIN = {
    "demonstrations": {},
    "policy": {},
    "quantile-stats": {"dataset": "demonstrations"},
    "train-vla": {"policy": "policy", "dataset": "demonstrations", "statistics": "quantile-stats"},
    "evaluate-libero": {"policy": "train-vla"},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    made = Project(tmp_path_factory.mktemp("robot-policy"))
    recipe = made.folder / "configs/train-vla/tiny.toml"
    shutil.move(recipe, recipe.with_name("_whole.toml"))
    recipe.write_text(SHORT)
    return made


@pytest.fixture(scope="module")
def made(project) -> dict[str, Artifact]:
    """The artifacts of the flow train-vla/tiny, by stage."""
    pytest.importorskip("robosuite", reason="needs the simulator: pip install 'armature-vla[libero]'")
    file = project.folder / "configs/train-vla/tiny.toml"
    recipe = recipe_from_file(file, "train-vla/tiny", [f'machine.store="{project.store}"'])
    artifacts: dict[str, Artifact] = {}
    for stage, inputs in CHAIN.items():
        artifacts[stage] = make(recipe, stage, **{name: artifacts[source] for name, source in inputs.items()})
    return artifacts


def document(artifact: Artifact, name: str) -> Any:
    return json.loads((artifact.path / name).read_text())


def test_libero_chain_from_demonstrations_to_evaluation(made):
    info = document(made["demonstrations"], "dataset/meta/info.json")
    assert info["total_episodes"] == 3 and info["fps"] == 20
    assert document(made["quantile-stats"], "stats.json")["action"]["count"] == [info["total_frames"]]
    numbers = document(made["train-vla"], "metrics.json")
    assert numbers["heldout_loss"] < numbers["heldout_loss_before"]
    assert [row["step"] for row in document(made["train-vla"], "history.json")][-1] == 4
    played = document(made["evaluate-libero"], "metrics.json")
    assert (played["episodes"], played["failed"]) == (2, 0) and 0 <= played["success"] <= 1
    assert list((made["evaluate-libero"].path / "videos").rglob("*.mp4"))


def test_bundle_of_the_evaluation_is_replayed_bit_for_bit(project, made, capsys):
    machine = Machine(store=str(project.store))
    bundle_evaluation(made["evaluate-libero"].digest, project.folder / "evaluation.zip", machine)
    verify_bundle(project.folder / "evaluation.zip", machine, episodes=1)
    assert "equal bit for bit: 1 of 1" in capsys.readouterr().out


def test_dvc_reuses_the_artifacts_of_the_flow(project, made):
    output = project.dvc("repro", "evaluate-libero")
    assert all(f"{stage}: already made" in output for stage in CHAIN)
    assert {stage: project.locked_digest(stage) for stage in CHAIN} == {
        name: each.digest for name, each in made.items()
    }
