"""The image `standalone`, as `make images` has built it, does what this checkout does, with far less around it."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from armature.components.contracts.installation import installed_commit

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "armature-standalone"
ANYBODY = "12345:0"
"""User and group ids without a name or files, such as OpenShift uses for containers."""
TRAINING = ("armature", "run", "train-vlm/colors")
STORE = Path("/opt/armature/.armature")

pytestmark = pytest.mark.timeout(3600)

Inside = Callable[..., str]
"""A function that runs a command in a container without a network, and returns its output. The container has the folder
`store` in place of its own store."""


def output(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    tool = os.environ.get("TOOL") or "buildah"
    image = f"{IMAGE}:{os.environ.get('TAG') or 'latest'}"

    def in_docker(*command: str, store: Path) -> str:
        options = ["--network", "none", "--user", ANYBODY, "--shm-size", "2g", "--volume", f"{store}:{STORE}"]
        return output(tool, "run", "--rm", *options, image, *command)

    if tool == "docker":
        yield in_docker
        return

    container = output(tool, "from", "--pull-never", image).strip()

    def in_buildah(*command: str, store: Path) -> str:
        run = [tool, "run", "--user", ANYBODY, "--volume", f"{store}:{STORE}", container, "--", *command]
        return output("unshare", "--net", "sh", "-c", f"ip link set lo up && exec {shlex.join(run)}")

    yield in_buildah
    output(tool, "rm", container)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder to which all users may write."""
    folder = tmp_path / "inside"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def weights(folder: Path) -> str:
    (checkpoint,) = folder.glob("store/train-vlm/*/checkpoint/model.safetensors")
    return hashlib.sha256(checkpoint.read_bytes()).hexdigest()


def test_image_trains_to_the_weights_of_a_checkout(inside, store, tmp_path):
    inside(*TRAINING, store=store)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/.venv-vllm").symlink_to(ROOT / ".venv-vllm")
    output(ROOT / ".venv/bin/armature", *TRAINING[1:], cwd=tmp_path / "outside")
    assert weights(store) == weights(tmp_path / "outside/.armature")


def stage(name: str, recipe: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs one stage of an installed recipe."""
    configs = "$(python -c 'from armature.components.contracts.installation import CONFIGS; print(CONFIGS)')"
    return ("sh", "-c", f"armature stage {name} --config {configs}/{recipe}.toml {shlex.join(words)}")


def test_libero_is_simulated_and_rendered_without_a_gpu(inside, store):
    few = ("--set", "demonstrations.episodes_per_task=1", "--machine", "workers.environments=1")
    inside(*stage("demonstrations", "train-vla/tiny", *few), store=store)
    assert list(store.glob("store/demonstrations/*/**/*.parquet"))


def test_alfworld_games_start_in_the_image(inside, store):
    inside(*stage("tasks", "train-vlm/molmo2-tiny"), store=store)
    assert list(store.glob("store/tasks/*/manifest.json"))


def test_image_has_its_commit_and_no_development_tools(inside, store):
    script = "from armature.components.contracts.installation import installed_commit; print(installed_commit())"
    assert inside("python", "-c", script, store=store).strip() == installed_commit()
    programs = inside("sh", "-c", "id -u; ls .venv/bin; command -v gcc make git || true", store=store).split()
    assert programs[0] == ANYBODY.partition(":")[0] and {"armature", "prefect", "mlflow"} <= set(programs)
    assert not {"pytest", "ruff", "mypy", "playwright", "sphinx-build", "/usr/bin/gcc"} & set(programs)


def test_image_user_cannot_change_installed_files(inside, store):
    assert inside("find", "/opt/armature", "-writable", "-not", "-type", "l", store=store).split() == [str(STORE)]
