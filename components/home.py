"""The folder in which runs keep what outlives them: `.armature` and `.venv-vllm` lie there. Standard library only.

It is the working folder, except in the temporary copy of a repository that DVC makes for `dvc exp run --temp` or
`--queue` and removes afterwards: there it is the folder of the repository that the working folder is a copy of.
"""

from __future__ import annotations

import os
from pathlib import Path

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
