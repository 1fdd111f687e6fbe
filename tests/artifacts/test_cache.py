"""Keys of the local cache change with a file's content."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from armature.components.artifacts.cache import file_sha256, file_state


def test_file_state_differs_after_every_change(tmp_path: Path) -> None:
    """Each change follows the previous one immediately, and keeps the file's size, modification time and inode."""
    path, seen = tmp_path / "file", set()
    path.write_bytes(b"0")
    changed = path.stat()
    for number in range(5):
        path.write_bytes(str(number).encode())
        os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
        seen.add(file_state(path))
        assert time.time_ns() - path.stat().st_ctime_ns >= 10_000_000  # a tick of 100 Hz
    assert len(seen) == 5


def test_file_sha256_notices_change_with_same_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first, times = file_sha256(path), path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_sha256(path) != first
