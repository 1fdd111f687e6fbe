"""The rollout table gives back what was written, to us and to pandas, and refuses what it does not know."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from armature.components.artifacts.tables import TableSchema, write_table
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory, Turn
from armature.components.rollouts.table import ROLLOUTS, read_rollouts, write_rollouts

from .conftest import a_turn

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
token_ids = arrays.arrays(np.int32, st.integers(0, 12), elements=st.integers(0, 2**31 - 1))
images = st.builds(
    ImageRef,
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    media_type=st.sampled_from(["image/png", "image/jpeg"]),
    width=st.integers(1, 10**5),
    height=st.integers(1, 10**5),
)


@st.composite
def turns(draw: st.DrawFn, index: int) -> Turn:
    completion = draw(token_ids)
    logprobs = arrays.arrays(np.float32, len(completion), elements=st.floats(-1e9, 0, width=32))
    return Turn(
        index=index,
        prompt_token_ids=draw(token_ids),
        completion_token_ids=completion,
        completion_logprobs=draw(logprobs),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        policy_version=draw(st.integers(0, 10**6)),
        images=tuple(draw(st.lists(images, max_size=3))),
        messages=draw(text),
        completion=draw(text),
        reward=draw(finite),
        reward_parts=draw(st.dictionaries(st.text(string.ascii_letters, min_size=1), finite, max_size=3)),
        anchor_key=draw(st.none() | text),
        admissible_key=draw(st.none() | text),
        action_defect=draw(st.sampled_from([None, "format", "inadmissible"])),
        generate_seconds=draw(finite),
        environment_seconds=draw(finite),
        experts=draw(st.none() | arrays.arrays(np.uint8, st.tuples(*[st.integers(0, 3)] * 3))),
    )


@st.composite
def outputs(draw: st.DrawFn) -> GenerateOutputs:
    trajectories, failures = [], []
    for number in range(draw(st.integers(0, 5))):
        names = (f"000001-0000-{number:02d}", "000001-0000")
        if draw(st.booleans()):
            failures.append(Failure(*names, draw(text), draw(text), draw(text)))
            continue
        played = tuple(draw(turns(index)) for index in range(draw(st.integers(1, 3))))
        truncated = draw(st.booleans())
        trajectories.append(Trajectory(*names, draw(text), draw(text), "train", played, truncated))
    return GenerateOutputs(tuple(trajectories), tuple(failures))


def plain(value: Any) -> Any:
    """Convert a value so that it can be compared with ==: dataclasses to dictionaries, and arrays to their dtype and
    their numbers."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@settings(max_examples=60)
@given(written=outputs())
def test_rollout_table_round_trip(written, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    write_rollouts(folder, written)
    assert plain(read_rollouts(folder)) == plain(written)


@settings(max_examples=10)
@given(written=outputs())
def test_equal_rollouts_give_equal_bytes(written, tmp_path_factory):
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    write_rollouts(one, written)
    write_rollouts(other, read_rollouts(one))
    for name in ("rollouts.parquet", "failures.parquet"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.fixture
def folder(tmp_path) -> Path:
    trajectories = [Trajectory(f"1-{k}", "1", "colors", "t", "train", (a_turn(0), a_turn(1)), False) for k in range(2)]
    write_rollouts(tmp_path, GenerateOutputs(trajectories, [Failure("1-2", "1", "t", "bad_image", "broken")]))
    return tmp_path


def test_pandas_reads_the_rollout_table(folder):
    frame = pd.read_parquet(folder / "rollouts.parquet")
    assert frame.shape == (4, len(ROLLOUTS.schema))
    assert frame["trajectory_id"].tolist() == ["1-0", "1-0", "1-1", "1-1"] and frame["turn"].tolist() == [0, 1, 0, 1]
    assert frame["completion_logprobs"][0].tolist() == [0, -1, -2]
    assert frame["images"][0][0]["sha256"] == "ab" * 32
    assert dict(frame["reward_parts"][0]) == {"correct": 1.0}
    assert pd.read_parquet(folder / "failures.parquet")["reason"].tolist() == ["bad_image"]


NEXT = TableSchema("rollouts", ROLLOUTS.version + 1, ROLLOUTS.schema)
REFUSED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "another version": ("rollouts", lambda path: write_table(path, pq.read_table(path), NEXT)),
    "another table": ("failures", lambda path: path.write_bytes((path.parent / "rollouts.parquet").read_bytes())),
    "no name": ("rollouts", lambda path: pq.write_table(pa.table({"turn": [1]}), path)),
    "damaged": ("rollouts", lambda path: path.write_bytes(path.read_bytes()[:500])),
    "missing": ("rollouts", lambda path: path.unlink()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rejects_foreign_and_damaged_tables(name, folder):
    table, damage = REFUSED[name]
    path = folder / f"{table}.parquet"
    damage(path)
    with pytest.raises(DataError) as caught:
        read_rollouts(folder)
    assert caught.value.where == str(path)
