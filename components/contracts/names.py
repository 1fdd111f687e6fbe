"""File names that come from foreign files: they stay in the folder that they are meant for."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath

from armature.components.contracts.errors import DataError


def confined(name: object, where: str) -> PurePosixPath:
    """`name` as a path below a folder, whatever machine wrote it. Symbolic links are not looked at.

    Raises:
        DataError: it is not a name, is absolute, or climbs out of the folder.
    """
    text = name if isinstance(name, str) else ""
    path = PurePosixPath(text.replace("\\", "/"))
    windows = PureWindowsPath(text)
    if not path.name or "\0" in text or ".." in path.parts or path.is_absolute() or windows.drive or windows.root:
        raise DataError(
            f"the file name {name!r:.200} does not stay in its folder",
            code="unsafe_file_name",
            where=where,
            remedy="use the original file; names in it are relative and have no '..'",
        )
    return path


def bare_name(name: object, where: str) -> str:
    """`name` if it is that of a file in the folder itself.

    Raises:
        DataError: it is not one, or has folders in it.
    """
    path = confined(name, where)
    if len(path.parts) != 1:
        raise DataError(
            f"the file name {name!r:.200} has folders in it",
            code="unsafe_file_name",
            where=where,
            remedy="use the original file",
        )
    return path.name
