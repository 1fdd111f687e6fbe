"""The page on rewards names every reward, every argument and every reason."""

from __future__ import annotations

import re
from pathlib import Path

from armature.components.contracts.failures import RolloutFailed
from armature.components.rewards import REWARDS
from armature.components.rewards.settings import NamedReward

PAGE = (Path(__file__).resolve().parents[2] / "docs/rewards.md").read_text()


def test_every_reward_and_argument_has_its_row() -> None:
    included = PAGE.partition("## Included")[2].partition("\n## ")[0]
    rows = {row.split("`")[1]: row for row in included.splitlines() if row.startswith("| `")}
    rows["judge"] += PAGE.partition("## A judge")[2]
    assert set(rows) == set(REWARDS)
    for name, row in rows.items():
        own = set(REWARDS[name].Settings.model_fields) - set(NamedReward.model_fields)
        assert own <= set(re.findall(r"`(\w+)`", row)), name


def test_every_reason_is_explained() -> None:
    reasons = set(re.findall(r"\b(?:reward|judge)_\w+", str(RolloutFailed.__doc__)))
    assert len(reasons) == 8
    assert {reason for reason in reasons if f"`{reason}`" not in PAGE} == set()
