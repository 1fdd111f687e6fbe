"""`armature verify`: read every artifact of a store and check that its files have not changed."""

from __future__ import annotations

from pathlib import Path

from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import is_folder


def verify(root: Path) -> None:
    """Check the digest of every artifact of the store at `root`.

    Raises:
        ConfigurationError: the store does not exist.
        DataError: the files of some artifacts have changed since they were made.
    """
    if not is_folder(root):
        raise ConfigurationError(
            "the artifact store does not exist",
            code="store_missing",
            where=str(root),
            remedy="name its folder with --store",
        )
    checked = list(ArtifactStore(root).verify())
    if damaged := [error for _, error in checked if error is not None]:
        raise DataError(
            "\n".join([f"{len(damaged)} of {len(checked)} artifacts are damaged", *map(str, damaged)]),
            code="artifacts_damaged",
        )
    print(f"{len(checked)} artifact{' is' if len(checked) == 1 else 's are'} unchanged")
