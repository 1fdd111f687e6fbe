"""A door that fails in every way that there is, for the test of the command itself."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armature.components.contracts.errors import DataError
from tests.fuzz.doors import Attempt, expect

KINDS = ("accepted", "refused", "raw", "silent", "memory", "died", "hang")


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    def attempt(rng: random.Random) -> bool:
        kind = rng.choice(KINDS)
        if kind == "refused":
            raise DataError("refused")
        if kind == "raw":
            raise KeyError("raw")
        expect(kind != "silent", "silent")
        if kind == "memory":
            b"x" * (5 * 2**28)
        if kind == "died":
            os._exit(1)
        if kind == "hang":
            time.sleep(60)
        return True

    yield attempt
