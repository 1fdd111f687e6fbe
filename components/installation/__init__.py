"""What is installed: its name, its version, and its files that are not code. Standard library only.

The links in this folder lead to folders of the repository; a wheel carries what they lead to. So one path holds in a
checkout and in a wheel.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from armature.components.home import home_folder

DISTRIBUTION = "armature-vla"
"""What pip installs. `armature`, the name of the package and the command, is another project on PyPI."""

_HERE = Path(__file__).resolve().parent
CONFIGS = (_HERE / "configs").resolve()
REQUIREMENTS = (_HERE / "requirements").resolve()
SERVED = _HERE.parent / "inference/served"
"""The package that runs inside vLLM's servers."""
CHECKOUT = _HERE.parents[1] if (_HERE.parents[1] / "pyproject.toml").is_file() else None
"""The repository; None in an installed wheel."""
MADE = ".made"
"""The file that marks an environment as complete."""


def installed_version() -> str:
    from importlib.metadata import version

    return version(DISTRIBUTION)


def installed_commit() -> str:
    """The checked-out commit, with "+changed" when files differ from it; else what ARMATURE_COMMIT says, as in images.

    Returns:
        "" if it is unknown.
    """
    if CHECKOUT is not None:
        command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+changed", "--exclude=*"]
        with suppress(FileNotFoundError):
            found = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False).stdout.strip()
            if found:
                return found
    return os.environ.get("ARMATURE_COMMIT", "")


def install_command(extra: str) -> str:
    """How a user gets the packages of an optional part."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def server_environment() -> Path:
    """Where `armature setup` makes the environment of the model servers.

    In a checkout `.venv-vllm`, as `make` does; else a folder of the user's data, one for each release.
    """
    if CHECKOUT is not None:
        return CHECKOUT / ".venv-vllm"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "armature" / f"vllm-{installed_version()}"


def server_python() -> Path:
    """The interpreter that has vLLM: of `.venv-vllm` in this folder, else of what `armature setup` has made."""
    here, made = home_folder() / ".venv-vllm/bin/python", server_environment()
    return made / "bin/python" if not here.exists() and (made / MADE).exists() else here
