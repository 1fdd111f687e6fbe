"""Errors of loader processes, which keep their code and their three parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import Dataset

from armature.components.contracts.errors import ArmatureError

Item = TypeVar("Item")


class ErrorCarrier(Dataset[Any]):
    """A dataset that returns the errors of its items, for `raise_errors`.

    torch's DataLoader makes a new error of a worker process's error, with a traceback as its text and without its code.
    """

    def __init__(self, items: Dataset[Any]) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._items[index]
        except ArmatureError as error:
            return error


def raise_errors(items: Iterable[Item | ArmatureError]) -> Iterator[Item]:
    """Yield the items, and raise the first error among them.

    Example:
        >>> from armature.components.contracts.errors import DataError
        >>> list(raise_errors([1, 2]))
        [1, 2]
        >>> list(raise_errors([1, DataError("the file is empty")]))
        Traceback (most recent call last):
        ...
        armature.components.contracts.errors.DataError: the file is empty
    """
    for item in items:
        if isinstance(item, ArmatureError):
            raise item
        yield item
