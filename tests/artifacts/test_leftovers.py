"""The next start removes temporary files of killed writers and keeps files of living writers."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from armature.components.artifacts.disk import atomic_replacement
from armature.components.artifacts.store import ArtifactStore
from armature.components.machine.private_files import write_private
from tests.refusals import refused

WRITER = """
import sys, time
from pathlib import Path
from armature.components.artifacts.store import ArtifactStore
store = ArtifactStore(Path(sys.argv[1]))

def fill(folder):
    (folder / "half").write_text("half")
    print("writing", flush=True)
    sys.stdin.readline()
    from armature.components.artifacts.manifest import write_manifest
    write_manifest(folder, kind=sys.argv[2], kind_version=1, rows={}, drops={}, inputs={}, settings={})

with store.lock("outer", sys.argv[3]):
    store.write(sys.argv[2], sys.argv[3], fill)
"""


@contextmanager
def writer(root: Path, stage: str, fingerprint: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process and wait until it has begun to write an artifact. It continues once a line is sent to it, and is
    killed at the end of the block."""
    command = [sys.executable, "-c", WRITER, str(root), stage, fingerprint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            while process.stdout.readline().strip() != "writing":
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def half_written(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/.*") if path.is_dir() and path.parent.name != "workspaces")


def test_next_start_removes_files_of_killed_writers_only(tmp_path):
    with writer(tmp_path, "alive", "f1") as alive:
        for stage in ("dead", "dead-too"):
            with writer(tmp_path, stage, "f2") as dying:
                os.kill(dying.pid, signal.SIGKILL)
        assert "dead-too" in half_written(tmp_path)
        with ArtifactStore(tmp_path).lock("outer", "f3"):
            assert half_written(tmp_path) == ["alive"]
        assert alive.poll() is None
        alive.communicate("\n")
    assert (tmp_path / "alive/f1/half").read_text() == "half" and half_written(tmp_path) == []


def test_next_start_removes_unfinished_images(tmp_path):
    left = tmp_path / "images/unfinished/.name.png-abcd1234"
    left.mkdir(parents=True)
    (left / "lock").touch()
    with ArtifactStore(tmp_path).lock("stage", "f1"):
        assert not left.exists()


def test_waiting_message_names_the_process_that_holds_the_lock(tmp_path):
    messages: list[str] = []

    def wait() -> None:
        with ArtifactStore(tmp_path, say=messages.append).lock("outer", "f1"):
            pass

    with writer(tmp_path, "stage", "f1") as holder:
        waiting = Thread(target=wait)
        waiting.start()
        while not messages:
            assert waiting.is_alive()
            time.sleep(0.01)
        holder.communicate("\n")
        waiting.join()
    assert len(messages) == 1
    assert re.search(rf"outer: waiting for process {holder.pid} on \S+ since 20\d\d-\d\d-\d\dT", messages[0])


def test_full_disk_while_locking_raises_disk_full(tmp_path):
    store, limits = ArtifactStore(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    with refused("disk_full", tmp_path):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            with store.lock("stage", "f1"):
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with store.lock("stage", "f1"):
        pass


KILLED = {
    "cache": """
from armature.components.artifacts.cache import make_once
make_once(folder / "file", lambda path: (path.write_text("half"), kill()))
""",
    "replaced folder": """
from armature.components.artifacts.disk import atomic_replacement
with atomic_replacement(folder / "weights") as new:
    (new / "half").write_text("half")
    kill()
""",
    "new folder": """
from armature.components.artifacts.disk import atomic_folder
with atomic_folder(folder / "dataset") as new:
    (new / "half").write_text("half")
    kill()
""",
    "scratch": """
from armature.components.machine.process import Scratch
held = Scratch()
(Path(held.name) / "half").write_text("half")
kill()
""",
    "reply of a judge": """
import armature.components.artifacts.disk as disk
from armature.components.rewards.judge.asking import ReplyCache
replies = ReplyCache("http://127.0.0.1")
disk._sync_all = lambda paths: kill()
replies.keep("0" * 64, "paid for")
""",
}
BEGIN = """
import os, signal, sys
from pathlib import Path
folder = Path(sys.argv[1])
def kill():
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("what", KILLED)
def test_next_start_removes_files_of_a_killed_process(tmp_path, what):
    """Each start is killed at the same place, so exactly its own half-written file remains."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "ARMATURE_CACHE": str(tmp_path)}

    def half_written() -> int:
        return sum(path.is_file() and path.stat().st_size > 0 for path in tmp_path.rglob("*"))

    for _ in range(3):
        command = [sys.executable, "-c", BEGIN + KILLED[what], str(tmp_path), str(int(signal.SIGKILL))]
        assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
        assert half_written() == 1


def test_unfinished_secret_file_is_removed(tmp_path):
    left, being_written = tmp_path / ".key-abcd", tmp_path / ".key-efgh"
    for file in (left, being_written):
        file.write_text("secret")
    os.utime(left, (0, 0))
    write_private(tmp_path / "key", "new")
    assert not left.exists() and being_written.exists() and (tmp_path / "key").read_text() == "new"


def test_atomic_replacement_keeps_unrelated_hidden_folders(tmp_path):
    mine, alive = tmp_path / ".weights-mine", tmp_path / ".weights-alive"
    for folder in (mine, alive):
        folder.mkdir()
    os.utime(mine, (0, 0))
    with (alive / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with atomic_replacement(tmp_path / "weights"):
            pass
    assert mine.exists() and alive.exists() and (tmp_path / "weights").is_dir()
