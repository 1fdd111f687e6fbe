"""The search index equals the tables of the store, even when tables are damaged or replaced."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from armature.components.contracts.rollouts import Failure
from armature.components.rollouts.batches.ratios import ratios_file
from armature.components.viewer.tables import Query, RolloutIndex, Side
from tests.viewer.conftest import RUN, Training


@pytest.fixture
def index(training: Training) -> Iterator[RolloutIndex]:
    made = RolloutIndex(training.root)
    yield made
    made.close()


def found(index: RolloutIndex, **query: object) -> list[str]:
    return [row["trajectory_id"] for row in index.search(RUN, Query.model_validate(query))["rows"]]


def test_filters_and_orders(training: Training, index: RolloutIndex) -> None:
    training.step(1, [0.0, 1.0, 0.5], ["blue", "It's 100% RED", "red_"])
    training.step(2, [0.25], ["green green"])
    assert index.refresh()
    assert not index.refresh()
    assert found(index) == ["00001-0000-00", "00001-0000-01", "00001-0000-02", "00002-0000-00"]
    assert found(index, sort="newest")[0] == "00002-0000-00"
    assert found(index, sort="reward-") == ["00001-0000-01", "00001-0000-02", "00002-0000-00", "00001-0000-00"]
    assert found(index, sort="length-", limit=1) == ["00001-0000-01"]
    assert found(index, low=0.25, high=0.5) == ["00001-0000-02", "00002-0000-00"]
    assert found(index, first_step=2) == found(index, group="00002-0000") == ["00002-0000-00"]
    assert found(index, find="100% red") == ["00001-0000-01"]
    assert found(index, find="red_") == ["00001-0000-02"]  # no character is a wildcard
    assert found(index, find="';DROP TABLE rollouts;--") == []
    assert found(index, offset=3) == ["00002-0000-00"]
    answer = index.search(RUN, Query(last_step=1))
    assert (answer["total"], answer["mean"]) == (3, pytest.approx(0.5))
    assert index.search("another", Query())["total"] == 0


@pytest.mark.parametrize("sort", ["order", "newest"])
@pytest.mark.parametrize("bounds", [{}, {"source": "train"}, {"source": "heldout"}, {"first_step": 1, "last_step": 2}])
def test_pages_without_filters_equal_pages_of_a_filter_that_all_pass(
    training: Training, index: RolloutIndex, sort: str, bounds: dict[str, object]
) -> None:
    """Pages in the order of steps are found by the counts of steps, other ones among all rollouts."""
    for step, count in ((1, 3), (2, 1), (4, 5)):
        training.step(step, [0.5] * count)
    for step in (0, 2):
        training.heldout(step, [1.0, 0.0])
    index.refresh()
    for limit in (1, 2, 3, 7, 500):
        for offset in range(15):
            query = Query.model_validate({"sort": sort, "limit": limit, "offset": offset, **bounds})
            assert index.search(RUN, query) == index.search(RUN, query.model_copy(update={"low": -1.0}))


def test_failures_and_tasks(training: Training, index: RolloutIndex) -> None:
    training.step(1, [0.0, 0.0], failures=[Failure("00001-0000-02", "00001-0000", "red", "timeout", "30 s")])
    training.step(2, [0.0, 1.0])
    index.refresh()
    assert index.failures(RUN, Query())["reasons"] == [{"reason": "timeout", "count": 1}]
    assert index.failures(RUN, Query(find="30 S"))["total"] == 1
    (task,) = index.tasks(RUN, Query())["rows"]
    assert (task["task_id"], task["rollouts"], task["reward"]) == ("red", 4, pytest.approx(0.25))
    assert (task["groups"], task["equal_groups"]) == (2, 1)
    assert (task["first_reward"], task["last_reward"]) == (0.0, 0.5)
    assert index.counts() == {RUN: {"rollouts": 4, "failures": 1, "last_step": 2, "heldout_steps": []}}


def test_compares_two_runs_on_their_common_tasks(training: Training, index: RolloutIndex) -> None:
    other = Training(training.root, training.image, "b" * 20)
    other.workspace.mkdir(parents=True)
    training.step(1, [0.0, 0.5])
    other.step(1, [1.0], ["crimson"])
    index.refresh()
    answer = index.compare(Side(RUN, "train"), Side(other.run, "train"), Query())
    assert (answer["total"], answer["better"], answer["worse"]) == (1, 1, 0)
    (row,) = answer["rows"]
    assert (row["first_reward"], row["second_reward"], row["second_completion"]) == (0.25, 1.0, "crimson")
    assert (row["second_step"], row["second_group"]) == (1, "00001-0000")
    assert index.compare(Side(RUN, "heldout"), Side(other.run, "train"), Query())["total"] == 0


def test_heldout_rollouts_have_their_own_source(training: Training, index: RolloutIndex) -> None:
    training.heldout(0, [0.0], ["blue"])
    training.step(1, [0.5, 0.0, 0.5], ["pink", "blue", "pink"])
    training.step(2, [1.0])
    training.heldout(2, [1.0], ["red"])
    index.refresh()
    assert found(index, source="heldout") == ["00000-0000-00", "00000-0000-00"]
    assert len(found(index, source="train")) == 4
    counts = index.counts()[RUN]
    assert (counts["rollouts"], counts["last_step"], counts["heldout_steps"]) == (6, 2, [0, 2])
    answer = index.compare(Side(RUN, "heldout", 0), Side(RUN, "heldout", 2), Query())
    (row,) = answer["rows"]
    assert (row["first_reward"], row["second_reward"], answer["better"]) == (0.0, 1.0, 1)
    assert (row["first_completion"], row["second_completion"]) == ("blue", "red")
    times = index.changes([RUN], "red")
    played = [(time["source"], time["step"]) for time in times]
    assert played == [("heldout", 0), ("train", 1), ("train", 2), ("heldout", 2)]
    assert (times[1]["rollouts"], times[1]["reward"], times[1]["different"]) == (3, pytest.approx(1 / 3), 2)
    answers = [(one["answer"], one["n"], one["reward"]) for one in times[1]["answers"]]
    assert answers == [("pink", 2, 0.5), ("blue", 1, 0.0)]
    assert index.changes([RUN], "green") == index.changes([], "red") == []


def test_sorts_by_largest_importance_ratio(training: Training, index: RolloutIndex) -> None:
    training.step(1, [0.25, 1.0, -2.0])
    training.step(2, [0.5])
    lost = ratios_file(training.workspace, 2)
    lost.write_bytes(lost.read_bytes()[:50])
    lost.with_suffix(".part").write_bytes(b"PAR1")
    index.refresh()
    order = ["00001-0000-02", "00001-0000-01", "00001-0000-00", "00002-0000-00"]  # what is not known comes last
    assert found(index, sort="ratio-") == order
    assert list(index.problems) == [str(lost)]
    assert found(index, sort="ratio-", source="train", high=0.9) == [order[0], *order[2:]]


def test_rewritten_table_replaces_its_rows(training: Training, index: RolloutIndex) -> None:
    training.step(1, [0.0, 0.0])
    index.refresh()
    shutil.rmtree(training.root / "rollouts" / f"{RUN}-00001")
    training.step(1, [1.0])
    index.refresh()
    assert index.search(RUN, Query())["total"] == 1
    shutil.rmtree(training.root / "rollouts" / f"{RUN}-00001")
    index.refresh()
    assert index.search(RUN, Query())["total"] == 0


def test_damaged_table_leaves_other_tables_readable(training: Training, index: RolloutIndex) -> None:
    for step in (1, 2, 3):
        training.step(step, [1.0])
    damaged = training.root / "rollouts" / f"{RUN}-00002" / "rollouts.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    index.refresh()
    assert {row["step"] for row in index.search(RUN, Query())["rows"]} == {1, 3}
    assert list(index.problems) == [str(damaged.parent)]
