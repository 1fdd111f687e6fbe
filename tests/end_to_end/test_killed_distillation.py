"""kill -9 while a teacher scores samples: the run resumes, and ends with the uninterrupted scores and weights."""

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
from armature.components.rollouts.batches.table import read_batch
from tests.end_to_end.conftest import make, start_stage

RECIPE = "train-vlm/colors-distilled"
STEPS, KILLED_AT = 4, 2
PART = '{name="colors", train_tasks=64, heldout_tasks=4}'
OVERRIDES = (
    f"trainer.max_steps={STEPS}",
    "trainer.save_every=2",
    "rollouts.groups_per_step=6",
    "preflight.groups=1",
    "model.tiny.format.steps=20",
    "inference.deterministic=true",
    "environment.name=mixture",
    "environment.train_tasks=64",
    "environment.heldout_tasks=4",
    f"environment.args={{parts={{one={PART}, two={PART}}}}}",
    "evaluation.kind_field=environment",
    "teacher.recipe=",
)

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def made(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in (folder / "store" / kind).glob("*-0*") if (path / "manifest.json").exists())


def scoring(folder: Path) -> bool:
    """Tell whether a teacher is scoring the samples of step `KILLED_AT`."""
    now = any((folder / "store/workspaces").glob("train-vlm-*/teacher/samples"))
    return now and len(made(folder, "rollouts")) == KILLED_AT and len(made(folder, "batches")) == KILLED_AT - 1


def test_run_killed_while_a_teacher_scores_resumes_to_the_uninterrupted_bits(tmp_path):
    values = [*OVERRIDES, f'machine.store="{tmp_path / "inputs"}"', 'teacher.source="."']
    recipe = load_recipe(RECIPE, values)
    tasks, student = make(recipe, "tasks"), make(recipe, "model")
    teachers = [make(load_recipe(RECIPE, [*values, f"model.tiny.seed={seed}"]), "model") for seed in (4, 5)]
    named = zip(("one", "two"), teachers, strict=True)
    overrides = [*OVERRIDES, *(f'teacher.kinds.{name}={{source="{each.path}"}}' for name, each in named)]
    inputs = {"tasks": tasks.path, "model": student.path}
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    run = start_stage("train-vlm", RECIPE, straight, overrides, inputs)
    assert run.wait() == 0, (straight / "run.log").read_text()[-4000:]
    scores = made(straight, "teacher-scores")
    assert len(scores) == STEPS
    for each in scores:
        rows = json.loads((each / "manifest.json").read_text())["rows"]
        assert sorted(rows) == ["teacher-one", "teacher-two"] and all(rows.values())

    run = start_stage("train-vlm", RECIPE, killed, overrides, inputs)
    while True:
        assert run.poll() is None, (killed / "run.log").read_text()[-4000:]
        if scoring(killed):
            os.kill(run.pid, signal.SIGSTOP)
            if scoring(killed):
                break
            pytest.fail("it was too late to stop the run")
        time.sleep(0.001)
    children = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, "child programs outlived the run"
    assert len(made(killed, "teacher-scores")) == KILLED_AT - 1
    first = (made(killed, "teacher-scores")[0] / "batch.parquet").stat().st_mtime_ns
    again = start_stage("train-vlm", RECIPE, killed, overrides, inputs)
    assert again.wait() == 0, (killed / "run.log").read_text()[-4000:]
    assert (made(killed, "teacher-scores")[0] / "batch.parquet").stat().st_mtime_ns == first  # not made again

    for one, other in zip(made(straight, "teacher-scores"), made(killed, "teacher-scores"), strict=True):
        for a, b in zip(read_batch(one), read_batch(other), strict=True):
            assert a.sample_id == b.sample_id and a.teacher and b.teacher
            assert a.teacher.logprobs.tobytes() == b.teacher.logprobs.tobytes()
            assert a.teacher.likeliest.tobytes() == b.teacher.likeliest.tobytes()
    one, other = (load_file(folder / "made/checkpoint/model.safetensors") for folder in (straight, killed))
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
