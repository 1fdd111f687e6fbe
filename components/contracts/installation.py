"""What is installed, and the folder in which runs keep what outlives them. Standard library only."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

# The folder in which runs keep what outlives them: `.armature` and `.venv-vllm` lie there. Standard library only.
#
# It is the working folder, except in the temporary copy of a repository that DVC makes for `dvc exp run --temp` or
# `--queue` and removes afterwards: there it is the folder of the repository that the working folder is a copy of.

REPOSITORY = "DVC_ROOT"
"""DVC's name for the repository, which a stage's command has; in a copy it is not that of the copy."""
COPIES = Path(".dvc/tmp/exps")


def home_folder() -> Path:
    return original(Path())


def original(path: Path) -> Path:
    """Where the repository has what is at `path` in a copy that DVC made; outside of one, `path`."""
    repository, here = Path(os.environ.get(REPOSITORY) or os.devnull).resolve(), Path.cwd()
    if not here.is_relative_to(repository / COPIES):
        return path
    copy = _checkout(here)
    if path.is_absolute() and not path.is_relative_to(copy):
        return path
    place = os.path.relpath(path, copy)  # by the names alone, so that "../data" is beside the repository
    return Path(os.path.normpath(_checkout(repository) / place))


def _checkout(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if (each / ".git").exists())


# What is installed: its name, its version, and its files that are not code. Standard library only.
#
# The links in this folder lead to folders of the repository; a wheel carries what they lead to. So one path holds in a
# checkout and in a wheel.

DISTRIBUTION = "armature-vla"
"""What pip installs. `armature`, the name of the package and the command, is another project on PyPI."""

_ROOT = Path(__file__).resolve().parents[2]
"""The repository; in a wheel the package `armature`, which carries the same folders."""
CONFIGS = _ROOT / "configs"
REQUIREMENTS = _ROOT / "requirements"
SERVED = _ROOT / "components/inference/served"
"""The package that runs inside vLLM's servers."""
CHECKOUT = _ROOT if (_ROOT / "pyproject.toml").is_file() else None
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


# Which version of this code runs.


def package_version() -> str:
    """`<version>+<commit>`, or the version alone where the commit is unknown."""
    commit, _, changed = installed_commit().partition("+")
    local = f"{commit[:9]}.{changed}".strip(".")
    return f"{installed_version()}+{local}" if local else installed_version()
