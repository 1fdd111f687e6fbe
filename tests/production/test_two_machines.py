"""Two machines that make the same run at the same time, each with a store of its own: there is one result.

The remote store is a folder here; `tests/interop/cluster/test_s3.py` has the race on the protocol of S3.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.digests import folder_digest
from armature.drill.runs import DrilledRun
from tests.chaos.colors import STEPS, colors_run, make_colors_inputs

pytestmark = pytest.mark.timeout(1800)
BEGUN = 4
"""Number of steps that the first machine has done when the second one begins. The remote store then has a
checkpoint."""


def stored(training: DrilledRun) -> dict[tuple[str, str], str]:
    """Return the digests of the rollouts and batches in the store of one machine's training, by kind and name."""
    result = {(each.kind, each.path.name): each.digest for each in ArtifactStore(training.store)}
    return {key: digest for key, digest in result.items() if key[0] in ("rollouts", "batches")}


def test_two_machines_on_one_run_have_one_result(tmp_path: Path) -> None:
    inputs, remote = make_colors_inputs(tmp_path / "inputs"), tmp_path / "remote"
    one, two = (colors_run(tmp_path / name, inputs, f"remote_store={remote}") for name in ("one", "two"))
    runs = [one.start()]
    while one.steps_done() < BEGUN:
        assert runs[0].returncode is None, one.log.read_text()[-4000:]
        time.sleep(0.1)
    runs.append(two.start())
    assert [run.wait() for run in runs] == [0, 0], two.log.read_text()[-4000:]

    assert folder_digest(one.folder / "made") == folder_digest(two.folder / "made")
    output = two.log.read_text()
    assert "has begun the same work (train-vlm-" in output and re.search(r"resuming after step [369]", output)
    assert (one.log.read_text() + output).count("another machine was first to make") >= 1  # at least the training
    assert stored(two) and stored(two).items() <= stored(one).items()  # both have trained on the same
    lineage, third = (
        json.loads((one.folder / "made/lineage.json").read_text()),
        ArtifactStore(tmp_path / "3", str(remote)),
    )
    assert [row["step"] for row in lineage if row["step"]] == list(range(1, STEPS + 1))
    for row in lineage:
        for name in row.keys() - {"step"}:
            result = third.find_digest(row[name])
            assert result is not None and result.digest == row[name], f"{name} of step {row['step']}"
    assert not [path for path in (remote / "attempts").glob("*/*") if path.is_dir()]
