"""What this machine and this code are, found without importing torch."""

from __future__ import annotations

import shutil
import subprocess

from components.installation import CHECKOUT, installed_version

PREFECT_PORT, MLFLOW_PORT = 4200, 5000


def gpu_count() -> int:
    """CUDA devices that the driver lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def package_version() -> str:
    """`<version>+<commit>`, or the version alone outside a git checkout."""
    if CHECKOUT is None:
        return installed_version()
    command = ["git", "describe", "--always", "--dirty=.changed", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    except FileNotFoundError:
        return installed_version()
    commit = found.stdout.strip()
    return f"{installed_version()}+{commit}" if commit else installed_version()
