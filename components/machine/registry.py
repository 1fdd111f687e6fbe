"""Names that stand for classes, imported when they are first asked for."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from armature.components.contracts.errors import ConfigurationError
from armature.components.machine.project import load_object


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest known one, and all of them."""
    known = sorted(known)
    alike = [each for each in known if unicodedata.normalize("NFKC", name) == unicodedata.normalize("NFKC", each)]
    for near in (alike or get_close_matches(name, known, n=1))[:1]:
        differ = [pair for pair in zip(name, near, strict=False) if pair[0] != pair[1]]
        same_length = len(name) == len(near)  # letters of two alphabets may look the same
        escaped = alike or (same_length and not all(each.isascii() for pair in differ for each in pair))
        apart = f" ({near!a}, not {name!a})" if escaped else ""
        return f"did you mean {near!r}{apart}? known: {', '.join(known)}"
    return f"known: {', '.join(known)}"


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, str]:
    """Entry points of the packages on the import path. Reading them takes milliseconds, and every recipe asks."""
    return {point.name: point.value for point in entry_points(group=group)}


class Registry:
    """Maps a name to "module:attribute"; other packages add names under the entry-point group `group`.

    With `modules`, "module:attribute" is itself a name, of what lies beside a recipe or is installed.
    """

    def __init__(self, noun: str, group: str, entries: dict[str, str], *, modules: bool = False) -> None:
        self.noun, self.group, self._entries, self._modules = noun, group, entries, modules

    def _all(self) -> dict[str, str]:
        return _entry_points(self.group, tuple(sys.path)) | self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._all()

    def __getitem__(self, name: str) -> Any:
        """The class or function called `name`.

        Raises:
            ConfigurationError: the name is unknown (the nearest known one is suggested), or what it stands for is not
                there.
        """
        if self._modules and ":" in name:
            return load_object(name, self.noun)
        entries = self._entries if name in self._entries else self._all()
        if name not in entries:
            own = "; or MODULE:NAME of a module beside the recipe" if self._modules else ""
            raise ConfigurationError(
                f"no {self.noun} is called {name!r}", code="unknown_name", remedy=suggestion(name, entries) + own
            )
        module, _, attribute = entries[name].partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:  # whatever a package raises that adds a name
            raise ConfigurationError(
                f"{self.noun} {name!r} cannot be loaded: {type(error).__name__}: {error}",
                code="name_not_loadable",
                where=entries[name],
                remedy="install what it needs, or correct the package that names it",
            ) from error
