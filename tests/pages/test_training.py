"""The training report's numbers, counted by hand."""

from __future__ import annotations

import re

from armature.components.pages.training import drops_by_reason, last_figures, with_figures, write_training_report

HISTORY = [
    {
        "step": 1,
        "reward": 0.0,
        "mismatch_kl/first_update": 3e-6,
        "rollouts/planned": 8,
        "failures/timeout": 1,
        "rollouts/failed": 1,
    },
    {"step": 2, "reward": 1.0, "mismatch_kl/first_update": 1e-6, "rollouts/planned": 8, "drops/too_long": 3},
]


def test_counts_are_shown_as_integers():
    assert drops_by_reason(HISTORY) == {"drops/too_long": 3, "failures/timeout": 1}
    assert last_figures(HISTORY) == {
        "steps": "2",
        "reward, last 1 steps": "1",
        "mismatch KL, largest": "3e-06",
        "rollouts": "16, 1 failed",
    }
    assert last_figures([]) == {} and drops_by_reason([]) == {}


def test_pages_are_reproducible(tmp_path):
    def write() -> list[bytes]:
        write_training_report(tmp_path, title="run", history=HISTORY, configuration={"trainer": {"seed": 1}})
        return [path.read_bytes() for path in sorted(tmp_path.iterdir())]

    first = write()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["report.html"]
    assert write() == first and b"trainer.seed" in first[0]


def test_later_figures_come_first_and_none_is_repeated(tmp_path):
    write_training_report(tmp_path, title="run", history=HISTORY, configuration={}, figures={"accuracy": "0.5"})
    page = (tmp_path / "report.html").read_text()
    added = with_figures(page, {"accuracy": "0.9", "<held-out>": "0.1 → 0.9"})
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", added)[:2] == [
        ("&lt;held-out&gt;", "0.1 → 0.9"),
        ("accuracy", "0.5"),
    ]
