"""The installed package, its folders and requirements, and the home folder of runs. Standard library only."""

from __future__ import annotations

import os
import re
import subprocess
import traceback
from contextlib import suppress
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError

# --- The home folder of runs, which holds `.armature` and `.venv-vllm` ---
#
# It is the working folder, with one exception: `dvc exp run --temp` and `--queue` run in a temporary copy of the
# repository, which DVC removes afterwards. There the home folder is the same folder of the original repository.

REPOSITORY = "DVC_ROOT"
"""Environment variable with the repository's root, which DVC sets for the command of a stage. In a temporary copy, it
is the root of the original repository."""
COPIES = Path(".dvc/tmp/exps")
"""Folder, relative to the repository, in which DVC makes the temporary copies."""


def home_folder() -> Path:
    """Return the home folder: runs keep files in it that other runs need later."""
    return original(Path())


def original(path: Path) -> Path:
    """Return the path in the original repository that corresponds to `path` in a copy made by DVC.

    Outside of such a copy, return `path` itself.
    """
    repository, here = Path(os.environ.get(REPOSITORY) or os.devnull).resolve(), Path.cwd()
    if not here.is_relative_to(repository / COPIES):
        return path
    copy = _checkout(here)
    if path.is_absolute() and not path.is_relative_to(copy):
        return path
    place = os.path.relpath(path, copy)  # by the names alone, so that "../data" is beside the repository
    return Path(os.path.normpath(_checkout(repository) / place))


def _checkout(folder: Path) -> Path:
    """Return the root of the git repository that contains `folder`."""
    return next(each for each in (folder, *folder.parents) if (each / ".git").exists())


# --- The installed package: its name, version, and files other than code ---
#
# The links in this folder lead to folders of the repository, and a wheel contains the targets of these links. So the
# same paths are valid in a checkout and in a wheel.

DISTRIBUTION = "armature-vla"
"""Name of the distribution for pip. On PyPI `armature`, our package and command, is the name of another project."""

_ROOT = Path(__file__).resolve().parents[2]
"""Root folder of the repository. In an installed wheel: the folder of the package `armature`, which contains the same
subfolders."""
CONFIGS = _ROOT / "configs"
REQUIREMENTS = _ROOT / "requirements"
SERVED = _ROOT / "components/inference/served"
"""Source of the plug-in package that runs inside vLLM servers."""
CHECKOUT = _ROOT if (_ROOT / "pyproject.toml").is_file() else None
"""Root folder of the git checkout; None if the package was installed from a wheel."""
MADE = ".made"
"""Name of the file that `armature setup` writes last, so it marks a Python environment as complete."""


def installed_version() -> str:
    """Return the version of the installed distribution."""
    from importlib.metadata import version

    return version(DISTRIBUTION)


def installed_commit() -> str:
    """Return the git commit of this code, with "+changed" if files differ from it; "" if the commit is unknown.

    In a checkout the commit comes from git. Elsewhere, for example in a container image, it is the value of the
    environment variable ARMATURE_COMMIT.
    """
    if CHECKOUT is not None:
        command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+changed", "--exclude=*"]
        with suppress(FileNotFoundError):
            description = subprocess.run(
                command, capture_output=True, text=True, cwd=CHECKOUT, check=False
            ).stdout.strip()
            if description:
                return description
    return os.environ.get("ARMATURE_COMMIT", "")


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of the extra `extra`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _extras() -> dict[str, str]:
    """Return the extra of each module that the distribution requires; "" for the requirements without an extra."""
    from importlib.metadata import requires

    extras: dict[str, str] = {}
    for requirement in requires(DISTRIBUTION) or ():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)", requirement)
        extras.setdefault(_IMPORTED.get(name, name).replace("-", "_").lower(), extra[1] if extra else "")
    return extras


_IMPORTED = {"hf-libero": "libero", "pillow": "pil"}
"""Module, in lower case, of each required distribution whose module has another name."""


def installation_error(error: BaseException) -> ConfigurationError | None:
    """Return the error that tells a user how to repair the installation, if this exception was raised by an import.

    A module that is not installed has the code `package_missing`. A required package whose import fails has the code
    `package_broken`: a torchvision that was built for another torch raises RuntimeError or OSError. None is returned
    for every other exception, missing modules of Armature itself included.

    Example:
        >>> installation_error(ModuleNotFoundError("No module named 'av'", name="av")).remedy
        "pip install 'armature-vla[datasets]'"
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    is_import = isinstance(error, ImportError | RuntimeError) or (isinstance(error, OSError) and error.errno is None)
    if not is_import:
        return None
    extras = _extras()
    for each in reversed(chain):  # the last error is that of the package; transformers raises its own from it
        top = each.name or "" if isinstance(each, ModuleNotFoundError) else ""
        if top.lower() in extras:  # a missing submodule, with a dot in its name, is a broken package
            extra = extras[top.lower()]
            remedy = install_command(extra) if extra else f"pip install {DISTRIBUTION}"
            return ConfigurationError(
                f"the package {top} is not installed", code="package_missing", where=top, remedy=remedy
            )
    for each in reversed(chain):
        module = ((each.name or "") if isinstance(each, ImportError) else "").partition(".")[0]
        frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__) if frame.f_code.co_name == "<module>"]
        tops = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames] + [module]
        broken = next((top for top in reversed(tops) if top.lower() in extras), None)
        if broken is not None:
            packages = "torch torchvision" if broken in ("torch", "torchvision") else broken
            return ConfigurationError(
                f"the package {broken} cannot be imported: {each}",
                code="package_broken",
                where=broken,
                remedy=f"pip install --force-reinstall {packages}",
            )
    top = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not top or top in ("armature", "components", "flows", "tasks"):
        return None
    return ConfigurationError(
        f"the package {top} is not installed", code="package_missing", where=top, remedy=f"pip install {top}"
    )


def server_environment() -> Path:
    """Return the folder in which `armature setup` creates the Python environment of the model servers.

    In a checkout the folder is `.venv-vllm`, which `make environments` uses too. In an installed wheel it is a folder
    in the user's data folder, a different one for each release.
    """
    if CHECKOUT is not None:
        return CHECKOUT / ".venv-vllm"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "armature" / f"vllm-{installed_version()}"


def server_python() -> Path:
    """Return the Python interpreter that has vLLM.

    It is the interpreter of `.venv-vllm` in the home folder, if there is one or if `armature setup` has completed no
    environment. Otherwise it is the interpreter of the environment that `armature setup` has created.
    """
    here, made = home_folder() / ".venv-vllm/bin/python", server_environment()
    return made / "bin/python" if not here.exists() and (made / MADE).exists() else here


def package_version() -> str:
    """Return `<version>+<commit>`, or only the version if the commit is unknown."""
    commit, _, changed = installed_commit().partition("+")
    local = f"{commit[:9]}.{changed}".strip(".")
    return f"{installed_version()}+{local}" if local else installed_version()
