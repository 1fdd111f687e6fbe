"""The folder of the recipe that this process works for: its relative paths begin there, and its own modules lie there.

A process has one, and its child processes have the same, by a variable of the environment. Without that, it is the
working folder: a recipe that is installed has nothing beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armature.components.home import original

VARIABLE = "ARMATURE_PROJECT"


def project_folder() -> Path:
    return Path(os.environ.get(VARIABLE, ""))


def project_path(path: str | Path) -> Path:
    """A path of a recipe: a relative one begins at the recipe's folder.

    In a copy that DVC made, what git and DVC did not put there is where the repository has it.
    """
    found = project_folder() / path
    return found if os.path.exists(found) else original(found)  # noqa: PTH110 (any text may be asked about)


def project_source(name: str) -> str:
    """A folder or a hub name: the path of the folder, if the recipe's folder has it."""
    path = project_path(name)
    return str(path) if os.path.isdir(path) else name  # noqa: PTH112 (any text may be asked about)


def use_project(folder: str) -> None:
    """Make `folder` the one of this process and its children. A step of a deployment, before its flow is loaded."""
    os.environ[VARIABLE] = str(Path(folder).resolve())


@contextmanager
def project(folder: Path | None) -> Iterator[None]:
    """Work for a recipe in `folder`; None: for one that is installed."""
    before = os.environ.pop(VARIABLE, None)
    try:
        if folder is not None:
            use_project(str(folder))
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
