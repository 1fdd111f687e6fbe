"""What Python's garbage collector looks through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from components.training.memory import exempt_from_collection


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def exempted() -> Iterator[Cycle]:
    kept = Cycle()
    exempt_from_collection()
    yield kept
    gc.unfreeze()


def test_what_there_is_is_left_out_and_later_garbage_is_found(exempted: Cycle) -> None:
    watched = gc.get_objects()
    assert not any(one is exempted for one in watched)
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None
