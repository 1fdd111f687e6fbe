"""kill -9 of a supervised training between two steps: the run resumes and ends with the uninterrupted weights."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine
from tests.end_to_end.conftest import start_stage

KILLED_AFTER = 5
OVERRIDES = ("trainer.epochs=1", "trainer.save_every=3", "model.tiny.format.steps=20")

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def steps_done(folder: Path) -> int:
    files = list((folder / "store/workspaces").glob("sft-*/history.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


@pytest.mark.parametrize("name", ["sft/colors", "sft/colors-dpo"])
def test_killed_training_resumes_to_the_uninterrupted_weights(name, tmp_path):
    recipe = load_recipe(name, [*OVERRIDES, f'machine.store="{tmp_path / "inputs"}"'])
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    model = run_stage("model", recipe.settings_for(STAGES["model"].settings), {}, machine)
    settings = recipe.settings_for(STAGES["conversations"].settings)
    data = run_stage("conversations", settings, {"model": model}, machine)
    inputs = {"model": model.path, "conversations": data.path}
    for each in ("straight", "killed"):  # images are beside the artifacts
        (tmp_path / each).mkdir()
        (tmp_path / each / "store").mkdir()
        (tmp_path / each / "store/images").symlink_to(tmp_path / "inputs/images")

    straight = start_stage("sft", name, tmp_path / "straight", OVERRIDES, inputs)
    assert straight.wait() == 0, (tmp_path / "straight/run.log").read_text()[-4000:]

    killed = start_stage("sft", name, tmp_path / "killed", OVERRIDES, inputs)
    while steps_done(tmp_path / "killed") < KILLED_AFTER:
        assert killed.poll() is None, (tmp_path / "killed/run.log").read_text()[-4000:]
        time.sleep(0.02)
    children = psutil.Process(killed.pid).children(recursive=True)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive, "child programs outlived the run"
    reached = steps_done(tmp_path / "killed")
    again = start_stage("sft", name, tmp_path / "killed", OVERRIDES, inputs)
    assert again.wait() == 0, (tmp_path / "killed/run.log").read_text()[-4000:]
    assert f"resuming after step {reached // 3 * 3}" in (tmp_path / "killed/run.log").read_text()

    one, other = (load_file(tmp_path / each / "made/checkpoint/model.safetensors") for each in ("straight", "killed"))
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    histories = [json.loads((tmp_path / each / "made/history.json").read_text()) for each in ("straight", "killed")]
    steps = [[(row["step"], row.get("loss"), row.get("heldout/loss")) for row in history] for history in histories]
    assert steps[0] == steps[1]
