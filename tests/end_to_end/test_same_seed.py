"""Two whole runs of a recipe with the same seeds end with the same weights, though each is beside other work."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from armature.components.machine.process import Program
from tests.production.recipe_stages import RECIPES, WEIGHTS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("recipe", ["train-vlm/colors", "train-vlm/molmo2-tiny"])
def test_simultaneous_runs_have_the_same_weights(tmp_path, recipe):
    """Their servers answer in another order and in other batches, as both are slowed down by the other one."""
    if not (ROOT / ".venv-vllm/bin/python").exists():
        pytest.skip("needs .venv-vllm: make environments")
    command = [sys.executable, "-m", "tests.production.recipe_stages", recipe, *RECIPES[recipe]]
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        store = f'machine.store="{tmp_path / name}/store"'
        runs.append(Program([*command, store], env=ENVIRONMENT, log=tmp_path / name / "run.log"))
    for run in runs:
        assert run.wait(2400) == 0, run.tail(60)
    one, other = (re.findall(f"{WEIGHTS}(.*)", run.tail(60)) for run in runs)
    assert len(one) == 1 and one == other
