"""Recipes learn: whole runs with three seeds, accuracy on held-out tasks before and after. `make learns` runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from armature.components.machine.process import Program

ROOT = Path(__file__).parents[2]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a day without a GPU")
LINE = re.compile(r"^accuracy +(\S+) \[(\S+), (\S+)\] → (\S+) \[(\S+), (\S+)\]$", re.MULTILINE)
"""The last lines of a run: accuracy with its 95 % interval before training, and after it."""


def run(recipe: str, seed: int, folder: Path, *options: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Run a recipe on this machine. Return accuracy, lower and upper bound, before and after training."""
    seeds = (f"trainer.seed={seed}", f"rollouts.seed={seed}")
    command = [sys.executable, "-m", "armature", "run", recipe, *(part for each in seeds for part in ("--set", each))]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = Program([*command, *options], env=environment, cwd=folder, log=folder / "run.log")
    assert done.wait(7200) == 0, done.tail(60)
    (numbers,) = LINE.findall((folder / "run.log").read_text())
    before, after = tuple(map(float, numbers[:3])), tuple(map(float, numbers[3:]))
    print(f"{recipe} seed {seed} {' '.join(options)}: {before} -> {after}")
    return before, after


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        ("train-vlm/colors", 0.9),
        ("train-vlm/motion-tiny", 0.95),
        ("train-vlm/zoom-tiny", 0.75),
        ("train-vlm/digits-tiny", 0.7),  # before is after SFT
        ("train-vlm/colors-distilled", 0.9),
        pytest.param("train-vlm/smollm2-alfworld", 0.8, marks=on_a_gpu),
        pytest.param("train-vlm/smollm2-sums", 0.25, marks=on_a_gpu),
    ],
)
def test_recipe_learns(recipe: str, least: float, seed: int, tmp_path: Path) -> None:
    before, after = run(recipe, seed, tmp_path)
    assert before[2] < after[1], "the intervals overlap"
    assert after[1] >= least


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dot_is_not_found_without_the_tool(seed: int, tmp_path: Path) -> None:
    _, after = run("train-vlm/zoom-tiny", seed, tmp_path, "--set", "environment.tools=")
    assert after[1] <= 1 / 8 <= after[2], "the policy does not guess one of eight colors"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gymnasium_environment_of_ones_own_is_learned(seed: int, tmp_path: Path) -> None:
    for name in ("line.py", "line.toml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    before, after = run("./line.toml", seed, tmp_path)
    assert before[2] < after[1], "the intervals overlap"
    assert after[1] >= 0.85


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("task", "least"), [("click-test", 0.65), ("focus-text", 0.85), ("click-dialog", 0.4)])
def test_clicks_in_a_browser_are_learned(task: str, least: float, seed: int, tmp_path: Path) -> None:
    for name in ("clicks.py", "clicks.toml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    tasks = ("args.make.task", "evaluation_args.make.task")
    chosen = (part for each in tasks for part in ("--set", f"environment.{each}={task}"))
    before, after = run("./clicks.toml", seed, tmp_path, *chosen)
    assert before[2] < after[1], "the intervals overlap"
    assert after[1] >= least


@on_a_gpu
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clicks_on_a_table_of_pages_are_learned(seed: int, tmp_path: Path) -> None:
    for name in ("clicks.py", "click_pages.py", "clicks-smolvlm.toml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    subprocess.run([sys.executable, "click_pages.py", "click-color"], cwd=tmp_path, check=True)
    seeds = (f"{each}.seed={seed}" for each in ("environment", "warm_start"))
    before, after = run("./clicks-smolvlm.toml", seed, tmp_path, *(part for each in seeds for part in ("--set", each)))
    assert before[2] < after[1], "the intervals overlap"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_minigrid_with_a_sentence_is_learned(seed: int, tmp_path: Path) -> None:
    before, after = run("train-vlm/minigrid-tiny", seed, tmp_path)
    assert before[2] < after[1], "the intervals overlap"
    assert after[1] >= 0.55
