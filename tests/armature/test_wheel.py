"""The wheel, installed outside the checkout: it carries every file, and the command works in an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = {
    "components/": "armature/components/",
    "flows/": "armature/flows/",
    "tasks/": "armature/tasks/",
    "configs/": "armature/configs/",
    "requirements/": "armature/requirements/",
}


@dataclass(frozen=True)
class Installed:
    """A new virtual environment in which the wheel is installed. Calling it runs one of its programs in an empty
    folder."""

    wheel: Path
    programs: Path
    folder: Path

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        environment["XDG_DATA_HOME"] = str(self.folder.parent / "data")
        command = [self.programs / words[0], *words[1:]]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """The project's wheel, installed in a new environment. It was built without a network, from a source distribution
    of the files that git tracks.

    The environment uses the dependencies of the current one.
    """
    home = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (home / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, home / "source" / name, follow_symlinks=False)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(home)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=home / "source", capture_output=True, check=True)
    (sources,) = home.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []
        archive.extractall(home, filter="data")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(home)!r})"
    unpacked = home / sources.name.removesuffix(".tar.gz")
    subprocess.run([sys.executable, "-c", build], cwd=unpacked, capture_output=True, check=True)
    (wheel,) = home.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    programs = home / "venv/bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run(pip, check=True)
    (site,) = (home / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    (home / "empty").mkdir()
    return Installed(wheel, programs, home / "empty")


@pytest.mark.slow
def test_wheel_contains_every_product_file(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        name: (ROOT / name).read_bytes()
        for name in tracked()
        if name.startswith("armature/") and (ROOT / name).is_file()
    }
    for folder, place in LINKED.items():
        result = [name for name in tracked() if name.startswith(folder) and (ROOT / name).is_file()]
        expected |= {place + name.removeprefix(folder): (ROOT / name).read_bytes() for name in result}
    assert held.keys() == expected.keys()
    assert [name for name in held if held[name] != expected[name]] == []


@pytest.mark.slow
def test_installed_command_works_in_an_empty_folder(installed):
    listed = installed("armature", "list", "--json")
    recipes = {f"{path.parent.name}/{path.stem}" for path in ROOT.glob("configs/[!_]*/[!_]*.toml")}
    assert listed.returncode == 0, listed.stderr
    assert {row["name"] for row in json.loads(listed.stdout)} == recipes

    shown = installed("armature", "show", "train-vlm/colors", "--set", "trainer.max_steps=5")
    assert tomllib.loads(shown.stdout)["trainer"]["max_steps"] == 5, shown.stderr

    helped = installed("armature", "setup", "--help")
    assert helped.returncode == 0 and "--folder" in helped.stdout

    checked = installed("armature", "check", "train-vlm/colors", "--configuration-only")
    assert checked.returncode == 2 and "`armature setup`" in checked.stderr, checked.stderr
    assert list(installed.folder.iterdir()) == []

    assert installed("armature", "init", "demo").returncode == 0
    ours = installed("armature", "check", "demo/recipe.toml", "--configuration-only")
    assert "every value is valid" in ours.stdout and "`armature setup`" in ours.stderr, ours.stdout + ours.stderr


@pytest.mark.slow
def test_installed_package_imports_nothing_from_the_checkout(installed):
    script = (
        "import armature, armature.components.contracts.installation as i, sys\n"
        "from armature import components, flows, tasks\n"
        "print(i.CHECKOUT, *(str(each).startswith(sys.prefix) for each in (armature.__file__, components.__file__,\n"
        "    flows.__file__, tasks.__file__, i.CONFIGS, i.REQUIREMENTS, i.SERVED)))\n"
        "print(i.package_version() == i.installed_version())\n"
        "from armature import load_recipe; print(load_recipe('train-vlm/colors').name)\n"
    )
    done = installed("python", "-c", script)
    assert done.stdout.split() == ["None", *["True"] * 8, "train-vlm/colors"], done.stdout + done.stderr


@pytest.mark.slow
def test_code_digest_is_equal_in_checkout_and_wheel(installed):
    names = "environments.colors", "environments.alfworld.text.environment", "rewards.number"
    modules = [f"armature.components.{name}" for name in names]
    script = f"from armature.components.artifacts.sources import code_digest; print(*map(code_digest, {modules}))"
    here = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(set(here.split())) == 3 and installed("python", "-c", script).stdout == here
