"""`armature init`: a small project to start from, which runs as it is."""

from __future__ import annotations

from pathlib import Path

from armature.components.contracts.errors import ConfigurationError
from armature.init.samples import write_samples

TEMPLATE = Path(__file__).parent / "template"
NAMES = {
    "dvc-config": ".dvc/config",
    "dvc-gitignore": ".dvc/.gitignore",
    "dvcignore": ".dvcignore",
    "gitignore": ".gitignore",
    "plots.html": ".dvc/plots.html",
    "reward.py.txt": "reward.py",
    "test_reward.py.txt": "test_reward.py",
}
"""Of files that would count as others here, or in a folder."""


def write_project(folder: Path) -> None:
    """A recipe, a reward function with its test, `dvc.yaml` with what `dvc init` makes, a README, and sample data.

    Raises:
        ConfigurationError: something is there already, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigurationError(
                "the folder is not empty", code="folder_not_empty", where=str(folder), remedy="name a new folder"
            )
        for file in sorted(TEMPLATE.iterdir()):
            if file.is_file():
                written = folder / NAMES.get(file.name, file.name)
                written.parent.mkdir(exist_ok=True)
                written.write_bytes(file.read_bytes())
        write_samples(folder / "data")
    except OSError as error:
        raise ConfigurationError(
            f"the project cannot be written: {error.strerror}", code="project_not_written", where=str(folder)
        ) from error
