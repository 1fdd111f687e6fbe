"""Names that stand for classes, imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from components.contracts.errors import ConfigurationError


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest known one, and all of them."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"


class Registry:
    """Maps a name to "module:attribute"; other packages add names under the entry-point group `group`."""

    def __init__(self, noun: str, group: str, entries: dict[str, str]) -> None:
        self.noun, self.group, self._entries = noun, group, entries

    def _all(self) -> dict[str, str]:
        return {point.name: point.value for point in entry_points(group=self.group)} | self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __contains__(self, name: str) -> bool:
        return name in self._all()

    def __getitem__(self, name: str) -> Any:
        """The class or function called `name`.

        Raises:
            ConfigurationError: the name is unknown (the nearest known one is suggested), or what it stands for is not
                there.
        """
        entries = self._all()
        if name not in entries:
            raise ConfigurationError(f"no {self.noun} is called {name!r}", remedy=suggestion(name, entries))
        module, _, attribute = entries[name].partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError, SyntaxError) as error:
            raise ConfigurationError(
                f"{self.noun} {name!r} cannot be loaded: {type(error).__name__}: {error}",
                where=entries[name],
                remedy="install what it needs, or correct the package that names it",
            ) from error
