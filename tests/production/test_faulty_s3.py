"""A store behind a bad network: one request in five fails, answers are late or lost, and it is away for a while.

Between the client and moto's server is a stand-in for the network, `faulty_network`, that does this on purpose.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from threading import Timer

import pytest

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.record import read_record
from armature.components.artifacts.remote import MARKER, NO_STAGES, RemoteMarker
from armature.components.artifacts.store import ArtifactStore
from tests.chaos.colors import colors_run, make_colors_inputs
from tests.interop.cluster.s3_server import Server, client_of, running
from tests.production.faulty_network import Faults, faulty

URL = "s3://bucket/prefix"
AWAY = 60.0
"""Seconds for which the server is away. This is far longer than the S3 client itself waits between its attempts."""
FAULTS = {"refused": 0.14, "unanswered": 0.04, "truncated": 0.02, "delay": 0.2}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path) as server:
        yield server


def held(server: Server) -> dict[str, str]:
    """Return the SHA-256 of each artifact file on the server that a marker lists, by the file's path in the store."""
    files = {}
    for name in (name for name in server.names() if name.endswith(MARKER)):
        home = name.removesuffix(f"/{MARKER}")
        content = server.client.get_object(Bucket="bucket", Key=name)["Body"].read()
        marker = RemoteMarker.model_validate_json(content)
        for relpath, (md5, _) in marker.files.items():
            files[f"{home.removeprefix('prefix/')}/{relpath}"] = server.sha256(f"{home}/{marker.copy_id}/{md5}")
    return files


def made(store: Path) -> dict[str, str]:
    """Return the SHA-256 of each artifact file in a local store, by the file's path in the store."""
    homes = [home for home in store.glob("*/*") if home.parent.name not in NO_STAGES and read_record(home)]
    files = (path for home in homes for path in home.rglob("*") if path.is_file())
    return {path.relative_to(store).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_file_is_uploaded_once_and_complete(tmp_path, server):
    def fill(folder: Path) -> None:
        for number in range(60):
            (folder / f"{number}").write_bytes(os.urandom(100))
        (folder / "large").write_bytes(os.urandom(2**20))
        write_manifest(folder, kind="stage", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    one, faults = tmp_path / "one", Faults(**FAULTS)
    with faulty(server.url, faults) as url, client_of(url):
        store = ArtifactStore(one, URL)
        store.write("stage", "f1", fill)
        store.send_waiting()
        faults.away.set()
        Timer(AWAY, faults.away.clear).start()
        store.write("stage", "f2", fill)
        store.send_waiting()
        result = ArtifactStore(tmp_path / "two", URL).find("stage", "f1")
    assert held(server) == made(one) and len(held(server)) == 2 * (60 + 2)
    assert result is not None and read_record(result.path).digest == read_record(one / "stage/f1").digest
    assert {"passed", "refused", "unanswered", "truncated", "away"} <= faults.counts.keys()


def test_disturbed_training_has_the_undisturbed_weights(tmp_path, server):
    inputs, faults = make_colors_inputs(tmp_path / "inputs"), Faults(**FAULTS)
    undisturbed = colors_run(tmp_path / "undisturbed", inputs)
    assert undisturbed.start().wait() == 0, undisturbed.log.read_text()[-4000:]
    with faulty(server.url, faults) as url, client_of(url):
        disturbed = colors_run(tmp_path / "disturbed", inputs, f"remote_store={URL}")
        run = disturbed.start()
        while disturbed.steps_done() < 3:
            assert run.returncode is None, disturbed.log.read_text()[-4000:]
            time.sleep(0.2)
        faults.away.set()
        Timer(AWAY, faults.away.clear).start()
        assert run.wait() == 0, disturbed.log.read_text()[-4000:]
    assert disturbed.results() == undisturbed.results()
    assert held(server) == made(disturbed.store)
    assert not [name for name in server.names() if name.endswith("newest.json")]
    assert {"passed", "refused", "unanswered", "truncated", "away"} <= faults.counts.keys()
