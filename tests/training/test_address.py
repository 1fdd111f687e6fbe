"""The file in which a trainer says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from armature.components.training.client import read_address

WHOLE = '{"url": "http://127.0.0.1:4321"}'


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_a_half_written_address_is_none(length: int, tmp_path: Path) -> None:
    file = tmp_path / "address.json"
    assert read_address(file) is None
    file.write_text(WHOLE[:length])
    assert read_address(file) is None
    file.write_text(WHOLE)
    assert read_address(file) == "http://127.0.0.1:4321"
