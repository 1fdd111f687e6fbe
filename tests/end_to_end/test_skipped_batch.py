"""A batch in the log that cannot be trained on: the run stops and names it, and continues without it when told to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, fingerprint
from armature.components.contracts.errors import DataError
from armature.components.contracts.stages import Artifact
from armature.components.rollouts.batches.table import write_batch
from tests.builders import make_sample
from tests.end_to_end.conftest import make

STEPS, POISONED = 3, 2
OVERRIDES = (
    f"trainer.max_steps={STEPS}",
    "rollouts.groups_per_step=2",
    "rollouts.group_size=2",
    "batches.skip_zero_advantage=false",
    "preflight.groups=1",
    "environment.train_tasks=8",
    "environment.heldout_tasks=1",
    "model.tiny.format.steps=1",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def poison(folder: Path) -> None:
    """Write a batch of two samples, of which the second has an invalid token id."""
    versions, ids = np.array([-1, -1, 1, 1], np.int32), np.array([100, 101, 102, 10**6], np.int32)
    sound = make_sample(input_ids=np.minimum(ids, 103), policy_versions=versions)
    write_batch(folder, [sound, replace(sound, sample_id="bad", input_ids=ids)])
    (folder / "metrics.json").write_text("{}")
    write_manifest(folder, kind="batches", kind_version=1, rows={"samples": 2}, drops={}, inputs={}, settings={})


def test_run_continues_without_the_skipped_batch(tmp_path, joined_url):
    where = (
        f'machine.store="{tmp_path}"',
        f'machine.servers.endpoints=["{joined_url}"]',
        "machine.trainer.loader_workers=0",
    )

    def stage(name: str, inputs: dict[str, Artifact], *more: str) -> Artifact:
        return make(load_recipe("train-vlm/colors", (*OVERRIDES, *where, *more)), name, **inputs)

    inputs = {name: stage(name, {}) for name in ("tasks", "model")}
    settings = load_recipe("train-vlm/colors", OVERRIDES).settings_for(STAGES["train-vlm"].settings)
    run = fingerprint(STAGES["train-vlm"], settings, inputs)
    batch = ArtifactStore(tmp_path).write("batches", f"{run}-{POISONED:05d}", poison)

    with pytest.raises(DataError) as stopped:
        stage("train-vlm", inputs)
    assert stopped.value.where == f"{batch.path}, row 1, sample bad"

    made = stage("train-vlm", inputs, f"machine.skip_batches=[{POISONED}]").path
    history = json.loads((made / "history.json").read_text())
    assert [(row["step"], row.get("batch/skipped", 0)) for row in history] == [(1, 0), (POISONED, 1), (STEPS, 0)]
    assert [row["updates"] for row in history] == [1, 0, 1]
    lineage = json.loads((made / "lineage.json").read_text())
    assert [row.get("skipped") for row in lineage] == [None, batch.digest, None]
