"""The fuzz command: it finds what is planted, and its damage is a function of the seed."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from tests.fuzz.doors.planted import KINDS
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps
from tests.fuzz.run import fuzz_door, table

pytestmark = pytest.mark.waits

DOCUMENT = {"a": [1, 2.5, "x"], "b": {"c": None, "d": [[], {}]}}


def test_fuzzer_finds_every_kind_of_failure_and_goes_on() -> None:
    planned = [random.Random(f"c/planted/{number}").choice(KINDS) for number in range(13)]
    assert set(planned) == set(KINDS)
    result = fuzz_door("planted", "c", range(13), time.monotonic() + 120)
    assert result.counts == Counter(planned)
    matches = {number: kind for number, kind, _ in result.findings}
    assert matches == {number: kind for number, kind in enumerate(planned) if kind not in ("accepted", "refused")}
    assert f"13 inputs, {len(matches)} findings" in table({"planted": result})


def test_damage_depends_on_the_seed_and_changes_the_input() -> None:
    data = bytes(range(200))
    for seed in range(200):
        first, second = (damaged_bytes(data, random.Random(seed)) for _ in range(2))
        assert first == second
        documents = [dumps(damaged_document(DOCUMENT, random.Random(seed))) for _ in range(2)]
        assert documents[0] == documents[1]
    changed = sum(damaged_bytes(data, random.Random(seed)) != data for seed in range(200))
    other = sum(dumps(damaged_document(DOCUMENT, random.Random(seed))) != dumps(DOCUMENT) for seed in range(200))
    assert changed > 180 and other > 150
