"""What this machine and this code are, found without importing torch."""

from __future__ import annotations

import shutil
import subprocess

from components.installation import installed_commit, installed_version

PREFECT_PORT, MLFLOW_PORT = 4200, 5000


def gpu_count() -> int:
    """CUDA devices that the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def package_version() -> str:
    """`<version>+<commit>`, or the version alone where the commit is unknown."""
    commit, _, changed = installed_commit().partition("+")
    local = f"{commit[:9]}.{changed}".strip(".")
    return f"{installed_version()}+{local}" if local else installed_version()
