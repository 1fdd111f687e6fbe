"""A dataset as an artifact: a reference to a folder, by the digest of what is in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from components.contracts.errors import ConfigurationError, DataError
from components.contracts.stages import Artifact, Report, Stage, StageContext
from components.datasets.lerobot.layout import INFO, TASKS
from components.datasets.lerobot.reader import Dataset, open_dataset
from components.datasets.settings import DatasetSettings

REFERENCE = "dataset.json"
CONTENT = (INFO, TASKS, "meta/episodes/**/*.parquet", "data/**/*.parquet", "videos/**/*.mp4")


class DatasetReference(BaseModel):
    """What a dataset artifact holds instead of gigabytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    digest: str


def dataset_digest(root: Path) -> str:
    """SHA-256 over names and contents of all files but meta/stats.json, which is computed from them.

    Raises:
        DataError: there is no dataset.
    """
    files = sorted({path for pattern in CONTENT for path in root.glob(pattern)})
    if root / INFO not in files:
        raise DataError("not a LeRobot dataset: it has no meta/info.json", where=str(root))
    with ThreadPoolExecutor() as executor:
        digests = list(executor.map(_sha256, files))
    names = [path.relative_to(root).as_posix() for path in files]
    listing = "".join(f"{name}\0{digest}\n" for name, digest in zip(names, digests, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def pinned(settings: DatasetSettings) -> DatasetSettings:
    """With the digest of what is in the folder now, so that a changed dataset is another artifact.

    Raises:
        ConfigurationError: the settings name another digest.
        DataError: there is no dataset.
    """
    digest = dataset_digest(Path(settings.path))
    if settings.digest not in (None, digest):
        raise ConfigurationError(
            f"the dataset has the digest {digest}, the settings say {settings.digest!r}",
            where=settings.path,
            remedy="give the right folder, or set digest to the actual value if this is the dataset that you mean",
        )
    return settings.model_copy(update={"digest": digest})


def refer(settings: DatasetSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext) -> Report:
    """`dataset.json`: where the dataset is and the digest of its content."""
    found = pinned(settings)
    dataset = open_dataset(Path(settings.path))
    reference = DatasetReference(path=str(Path(settings.path).resolve()), digest=str(found.digest))
    (folder / REFERENCE).write_text(json.dumps(reference.model_dump(), indent=1, sort_keys=True) + "\n")
    context.events.message(f"dataset: refers to {settings.path}, digest {found.digest}")
    return Report(rows={"episodes": dataset.info.total_episodes, "frames": dataset.info.total_frames})


DATASET_STAGE = Stage("dataset", 1, DatasetSettings, (), refer)


def open_source(artifact: Path) -> Dataset:
    """The dataset that the artifact refers to.

    Raises:
        DataError: no such artifact, or the dataset has changed since.
    """
    path = artifact / REFERENCE
    try:
        reference = DatasetReference.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError("not an artifact of the dataset stage", where=str(path)) from error
    digest = dataset_digest(Path(reference.path))
    if digest != reference.digest:
        raise DataError(
            f"the dataset has changed: its digest is {digest}, not {reference.digest}",
            where=f"{reference.path}, referred to by {path}",
            remedy=f"put the old files back, or set dataset.digest to {digest} to take the new ones",
        )
    return open_dataset(Path(reference.path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
