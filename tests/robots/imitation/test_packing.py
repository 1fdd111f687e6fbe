from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from armature.components.robots.imitation.data import packed_rows
from armature.components.robots.imitation.settings import PackingSettings


def test_rows_are_filled_by_best_fit() -> None:
    lengths = [500, 300, 200, 450, 550, 1100]
    rows = packed_rows(lengths, PackingSettings(max_row_tokens=1000, max_row_examples=3))
    assert rows == [[0, 1, 2], [3, 4], [5]]
    rows = packed_rows(lengths, PackingSettings(max_row_tokens=1000, max_row_examples=2))
    assert rows == [[0, 1], [2], [3, 4], [5]]


@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=40),
    st.integers(20, 200),
    st.integers(1, 6),
)
def test_each_example_has_one_row_and_no_row_exceeds_its_limits(lengths: list[int], tokens: int, examples: int) -> None:
    rows = packed_rows(lengths, PackingSettings(max_row_tokens=tokens, max_row_examples=examples))
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or (sum(lengths[i] for i in row) <= tokens and len(row) <= examples)
    if examples >= len(lengths):
        # Best fit: no two rows would fit into one.
        sums = sorted(sum(lengths[i] for i in row) for row in rows)
        assert len(sums) < 2 or sums[0] + sums[1] > tokens
