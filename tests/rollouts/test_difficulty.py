"""Tasks without signal, counted by hand."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from armature.components.artifacts.tables import read_table, write_table
from armature.components.contracts.errors import DataError
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.rollouts.sampler import (
    DIFFICULTY,
    PlayedGroup,
    TaskDifficulty,
    difficulty,
    difficulty_counts,
    played_groups,
)
from armature.components.rollouts.table import write_rollouts
from tests.pages.conftest import make_trajectory


def test_groups_have_the_rewards_of_whole_episodes(tmp_path):
    one = make_trajectory("a", reward=0.1, group="g0")
    two_turns = replace(one, trajectory_id="b", turns=(one.turns[0], replace(one.turns[0], index=1, reward=0.2)))
    alone = replace(make_trajectory("c", reward=0.3, group="g1"), task_id="colors/other")
    write_rollouts(tmp_path, GenerateOutputs((one, two_turns, alone)))
    groups = played_groups(7, tmp_path)
    assert groups[0] == PlayedGroup(7, "colors/a", 0.1, pytest.approx(0.3))
    assert groups[1] == PlayedGroup(7, "colors/other", 0.3, 0.3)
    assert [group.differs for group in groups] == [True, False]
    assert not PlayedGroup(1, "t", 0.1 + 0.2, 0.3).differs  # an ulp is no signal
    with pytest.raises(DataError) as caught:
        played_groups(7, tmp_path / "none")
    assert caught.value.where == str(tmp_path / "none/rollouts.parquet")


def test_task_statistics_count_group_outcomes(tmp_path):
    groups = [
        PlayedGroup(1, "learned", 0.0, 0.0),
        PlayedGroup(5, "learned", 0.0, 2.0),
        PlayedGroup(9, "learned", 2.0, 2.0),
        PlayedGroup(2, "easy", 2.0, 2.0),
        PlayedGroup(3, "easy", 2.0, 2.0),
        PlayedGroup(2, "hard", 0.0, 0.0),
        PlayedGroup(3, "so-so", 1.0, 1.0),  # more than nothing, and less than others earn
        PlayedGroup(2, "jumped", 0.0, 0.0),
        PlayedGroup(8, "jumped", 2.0, 2.0),
    ]
    tasks = difficulty(groups)
    assert tasks == [
        TaskDifficulty("easy", 2, 0, 2, 0, 3, False),
        TaskDifficulty("hard", 1, 0, 0, 1, 2, False),
        TaskDifficulty("jumped", 2, 0, 1, 1, 8, False),
        TaskDifficulty("learned", 3, 1, 1, 1, 9, False),
        TaskDifficulty("so-so", 1, 0, 0, 1, 3, False),
    ]
    counts = difficulty_counts(tasks)
    assert list(counts.values()) == [5, 1, 1, 2, 1]
    assert counts["tasks/played"] == counts["tasks/with_signal"] + sum(list(counts.values())[2:])
    assert difficulty([]) == [] and set(difficulty_counts([]).values()) == {0}
    write_table(tmp_path / "difficulty.parquet", [asdict(task) for task in tasks], DIFFICULTY)
    assert read_table(tmp_path / "difficulty.parquet", DIFFICULTY).num_rows == 5
