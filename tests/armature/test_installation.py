"""A wrong installation is one error with the command that repairs it, in every command that needs the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from armature.components.contracts.installation import installation_error

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = ("torch", "torchvision", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub")
"""Packages of the extra `train` that this interpreter pretends not to have."""

HIDES = "import sys\nsys.modules.update(dict.fromkeys({names!r}))\n"
"""A sitecustomize module: an import of each of `names` raises ModuleNotFoundError in its process."""

OTHER_TORCH = 'import torch\ntorch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "Meta")\n'
"""The first thing that torchvision does; torch refuses it when torchvision's library was built for another torch."""


def starts(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `armature` in a new process that imports modules of `folder` before all others."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{REPOSITORY}"}
    command = [sys.executable, "-m", "armature", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "words",
    [
        "check train-vlm/colors",
        "check train-vla/tiny --configuration-only",
        "plan train-vlm/colors",
        "run train-vlm/colors",
        "export model out",
        "push model name",
        "serve model",
        "serve-policy model",
        "stage model --config {recipe} --out out",
        "view",
    ],
)
def test_command_without_the_train_extra_names_the_command_that_installs_it(words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(names=TRAIN))
    done = starts(tmp_path, *words.format(recipe=REPOSITORY / "configs/train-vlm/colors.toml").split())
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "code: package_missing" in done.stderr and "pip install 'armature-vla[train]'" in done.stderr


@pytest.mark.parametrize("words", ["list", "show train-vlm/colors"])
def test_commands_that_need_no_torch_work_without_the_train_extra(words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(names=TRAIN))
    assert starts(tmp_path, *words.split()).returncode == 0


def test_torchvision_of_another_torch_names_the_command_that_repairs_it(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(OTHER_TORCH)
    done = starts(tmp_path, "check", "train-vlm/colors")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "code: package_broken" in done.stderr and "--force-reinstall torch torchvision" in done.stderr


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("torch", "pip install 'armature-vla[train]'"),
        ("libero", "pip install 'armature-vla[libero]'"),
        ("ai2thor", "pip install 'armature-vla[thor]'"),
        ("math_verify", "pip install 'armature-vla[math]'"),
        ("PIL", "pip install armature-vla"),
        ("a_package_of_others", "pip install a_package_of_others"),
    ],
)
def test_missing_module_names_its_extra(module, remedy):
    problem = installation_error(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert problem is not None and (problem.code, problem.where, problem.remedy) == ("package_missing", module, remedy)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'armature.none'", name="armature.none"),
        RuntimeError("a shape is wrong"),
        FileNotFoundError(2, "no such file", "x"),
        ImportError("import armature.flows, not flows", name=None),
    ],
)
def test_other_errors_are_not_errors_of_the_installation(error):
    assert installation_error(error) is None
