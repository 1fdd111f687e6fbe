"""Digests of what is read: files that arguments name, and versions of packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from armature.components.artifacts.cache import file_sha256
from armature.components.artifacts.digests import document_digest
from armature.components.project import project_path

LONGEST_PATH = 4096


def named_files(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The digest of what lies in the files and folders whose paths are among `arguments`; nothing if none is.

    A path is a text with a slash or a suffix, so that a word is not taken for a folder that happens to be here.
    """
    found = {}
    for where, text in _texts(arguments, ""):
        path = project_path(text)
        if path.is_file() and ("/" in text or path.suffix):
            found[where] = file_sha256(path)
        elif path.is_dir() and "/" in text:
            files = sorted(each for each in path.rglob("*") if each.is_file())
            found[where] = document_digest({each.relative_to(path).as_posix(): file_sha256(each) for each in files})
    return {"data": document_digest(found)} if found else {}


def versions(*distributions: str) -> dict[str, str]:
    """The versions of installed distributions; "" of one that is not."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    return {name: installed(name) for name in distributions}


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{where}[{index}]")
    elif isinstance(value, str) and 0 < len(value) < LONGEST_PATH and "\0" not in value:
        yield where, value
