"""vLLM finds the weights of a checkpoint in a folder of any name, by our plug-in."""

from __future__ import annotations

import os
import subprocess

import pytest

from armature.components.contracts.installation import SERVED
from armature.components.contracts.machine import Machine
from tests.hostile_names import EVERY_CHARACTER

PROGRAM = """
import sys
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from armature_served import register

register()
loader = DefaultModelLoader(LoadConfig(load_format="safetensors"))
print(loader._prepare_weights(sys.argv[1], None, None, False, None)[1])
"""


@pytest.mark.long
@pytest.mark.slow
def test_weight_folder_may_have_any_name(tmp_path):
    python = Machine().server_interpreter
    if not python.exists():
        pytest.skip("no environment of vLLM: armature setup")
    folder = tmp_path / EVERY_CHARACTER
    folder.mkdir()
    (folder / "model.safetensors").touch()
    environment = os.environ | {"PYTHONPATH": str(SERVED)}
    done = subprocess.run([python, "-c", PROGRAM, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == str([str(folder / "model.safetensors")])
