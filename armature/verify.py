"""`armature verify`: whether every artifact of a store is as it was made, by reading all of it."""

from __future__ import annotations

from pathlib import Path

from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import is_folder


def verify(root: Path) -> None:
    """
    Raises:
        ConfigurationError: there is no store.
        DataError: some artifacts are not as they were made.
    """
    if not is_folder(root):
        raise ConfigurationError(
            "there is no artifact store", code="store_missing", where=str(root), remedy="name its folder with --store"
        )
    checked = list(ArtifactStore(root).verify())
    if damaged := [error for _, error in checked if error is not None]:
        raise DataError(
            "\n".join([f"{len(damaged)} of {len(checked)} artifacts are damaged", *map(str, damaged)]),
            code="artifacts_damaged",
        )
    print(f"{len(checked)} artifact{' is as it was' if len(checked) == 1 else 's are as they were'} made")
