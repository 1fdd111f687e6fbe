"""Environments of verifiers lie in `samples`, and are found there by name as installed ones are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "samples"))
    yield
    for name in [name for name in sys.modules if name.startswith("sample_")]:
        del sys.modules[name]
