"""Registries of classes and functions by name, which are imported when they are first used."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from armature.components.contracts.errors import InvalidName
from armature.components.machine.project import load_object


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the nearest known name, and the list of all.

    >>> suggestion("recal", ["colors", "recall"])
    "did you mean 'recall'? known: colors, recall"

    A name may also be a part of a known name, or contain its initials, such as `lr` of `learning_rate`.
    """
    known = sorted(known)
    if near := nearest(name, known):
        differ = [pair for pair in zip(name, near, strict=False) if pair[0] != pair[1]]
        same_length = len(name) == len(near)  # letters of two alphabets may look the same
        escaped = _equal_in_nfkc(name, near) or (
            same_length and not all(each.isascii() for pair in differ for each in pair)
        )
        apart = f" ({near!a}, not {name!a})" if escaped else ""
        return f"did you mean {near!r}{apart}? known: {', '.join(known)}"
    return f"known: {', '.join(known)}"


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the one of `names` that an unknown `name` means, as `suggestion` finds it; "" if none is near."""
    alike = [each for each in names if _equal_in_nfkc(name, each)]
    initials = {"".join(word[:1] for word in each.split("_")): each for each in names if "_" in each}
    short = [initials[word] for word in name.split("_") if len(word) > 1 and word in initials]
    longer = sorted(
        (each for each in names if len(name) > 2 and name in each),
        key=lambda each: (not each.endswith(name), len(each)),
    )
    return (alike or short or get_close_matches(name, names, n=1) or longer or [""])[0]


def _equal_in_nfkc(one: str, other: str) -> bool:
    return unicodedata.normalize("NFKC", one) == unicodedata.normalize("NFKC", other)


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, str]:
    """Return the entry points in `group` of the packages on the import path, as a dict from name to "module:attribute".

    Cached for each import path, because reading them takes milliseconds.
    """
    return {point.name: point.value for point in entry_points(group=group)}


class Registry:
    """A mapping of names to objects given as "module:attribute".

    Other packages add names under the entry-point group `group`. With `modules`, "module:attribute" itself is also a
    valid name, for an object in a module beside the recipe or in an installed one.

    Example:
        >>> shapes = Registry("shape", "example.shapes", {"ordered": "collections:OrderedDict"})
        >>> shapes["ordered"].__name__, "round" in shapes
        ('OrderedDict', False)
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
        """Return the class or function called `name`.

        Raises:
            InvalidName: the name is unknown (the nearest known one is suggested), or its object cannot be
                loaded.
        """
        if self._modules and ":" in name:
            return load_object(name, self.noun)
        entries = self._entries if name in self._entries else self._all()
        if name not in entries:
            other = "; or MODULE:NAME of a module beside the recipe" if self._modules else ""
            raise InvalidName(
                f"no {self.noun} is called {name!r}", code="unknown_name", remedy=suggestion(name, entries) + other
            )
        module, _, attribute = entries[name].partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:  # the package that adds the name may raise anything
            raise InvalidName(
                f"{self.noun} {name!r} cannot be loaded: {type(error).__name__}: {error}",
                code="name_not_loadable",
                where=entries[name],
                remedy="install what it needs, or correct the package that names it",
            ) from error
