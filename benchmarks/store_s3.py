"""Small files sent to moto's server behind a network that takes its time, in an environment that has a client of S3."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import fsspec

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from benchmarks.table import Row, seconds
from tests.interop.cluster.s3_server import Server, client_of, running
from tests.production.faulty_network import Faults, faulty

FILES, BASELINE_FILES, DELAY = 10_000, 500, 0.04
BASELINE = "0.1: its folder and a file, one after another"


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as scratch,
        running(Path(scratch)) as server,
        faulty(server.url, Faults(delay=DELAY)) as url,
        client_of(url),
    ):
        ours, ours_requests = _ours(Path(scratch), server)
        baseline, baseline_requests = _baseline(Path(scratch) / "one/stage/f1", server)
    note = f"{FILES:,} files of 100 bytes, answers after {DELAY / 2 * 1e3:.0f} ms on average"
    rows = [
        Row("files per second", FILES / ours, BASELINE_FILES / baseline, BASELINE, "files/s", "higher", note),
        Row("requests per file", ours_requests / FILES, baseline_requests / BASELINE_FILES, BASELINE, "", "lower", ""),
    ]
    print(json.dumps([asdict(row) for row in rows]))


def _ours(folder: Path, server: Server) -> tuple[float, int]:
    def fill(home: Path) -> None:
        for number in range(FILES):
            (home / f"{number}").write_bytes(os.urandom(100))
        write_manifest(home, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    ArtifactStore(folder / "one").write("stage", "f1", fill)
    store = ArtifactStore(folder / "one", "s3://bucket/prefix", say=lambda line: print(line, file=sys.stderr))
    store.find("stage", "f1")
    before = _requests(server)
    return seconds(store.send_waiting), _requests(server) - before


def _baseline(home: Path, server: Server) -> tuple[float, int]:
    filesystem = fsspec.filesystem("s3")

    def send() -> None:
        for number in range(BASELINE_FILES):
            filesystem.makedirs("bucket/baseline", exist_ok=True)
            filesystem.put_file(str(home / f"{number}"), f"bucket/baseline/{number}")

    before = _requests(server)
    return seconds(send), _requests(server) - before


def _requests(server: Server) -> int:
    return sum(server.requests(method) for method in ("GET", "HEAD", "PUT", "POST"))


if __name__ == "__main__":
    main()
