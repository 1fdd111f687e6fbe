"""A store that 0.1.0 wrote, opened by today's code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from components.artifacts.manifest import read_manifest
from components.artifacts.store import ArtifactStore
from components.contracts.errors import DataError
from components.environments.stage import load_environment, load_tasks

KEY = "04f3e7b01309c543d980"
DIGEST = "baeb7085bbbe05ab62cb1cc0a9b7fed6.dir"
"""As 0.1.0 printed it."""


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    shutil.copytree(Path(__file__).with_name("store_of_0_1"), tmp_path / "store")
    return ArtifactStore(tmp_path / "store")


def test_its_artifacts_are_found_and_read(store: ArtifactStore) -> None:
    found = store.find("tasks", KEY)
    assert found is not None and found.digest == DIGEST
    assert read_manifest(found.path).rows == {"train": 4, "heldout": 2}
    load_environment(found.path)
    tasks = load_tasks(found.path, "train")
    assert [task.task_id for task in tasks] == list(dict.fromkeys(task.task_id for task in tasks)) and len(tasks) == 4


def test_they_are_found_by_their_digest(store: ArtifactStore) -> None:
    assert [each.digest for each in store] == [DIGEST]
    found = store.find_digest(DIGEST[:12])
    assert found is not None and (found.path.name, found.digest) == (KEY, DIGEST)


def test_a_manifest_of_another_version_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "store/tasks" / KEY / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"manifest_version": 2}))
    with pytest.raises(DataError, match="written by another version of armature"):
        read_manifest(path.parent)
