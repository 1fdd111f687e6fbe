"""`armature init`: write a small project that runs unchanged and that users adapt."""

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
"""Names that template files get in the project, by their names in the template. The files have other names here,
because git and pytest would act on files called .gitignore or test_*.py."""


def write_project(folder: Path) -> None:
    """Write a project: a recipe, a reward function with its test, a DVC pipeline, a README and sample data.

    Raises:
        ConfigurationError: the folder is not empty, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigurationError(
                "the folder is not empty", code="folder_not_empty", where=str(folder), remedy="name a new folder"
            )
        for file in sorted(TEMPLATE.iterdir()):
            if file.is_file():
                target = folder / NAMES.get(file.name, file.name)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(file.read_bytes())
        write_samples(folder / "data")
    except OSError as error:
        raise ConfigurationError(
            f"the project cannot be written: {error.strerror}", code="project_not_written", where=str(folder)
        ) from error
