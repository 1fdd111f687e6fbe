"""How good each turn was, against its siblings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from armature.components.batches.gigpo import gigpo
from armature.components.batches.groups import Group, Values, deviation, groups_of
from armature.components.batches.settings import RLOO, BatchSettings, Deviation, GroupMean
from armature.components.contracts.batches import TurnAdvantages
from armature.components.contracts.metrics import merged
from armature.components.contracts.rollouts import Trajectory, all_equal

EPSILON = 1e-4


@dataclass(frozen=True)
class Advantages:
    """`by_turn`: the advantage of every turn. `without_gradient`: ids of groups all of whose turns have 0."""

    by_turn: TurnAdvantages
    without_gradient: frozenset[str]
    metrics: dict[str, float]


def turn_advantages(trajectories: Sequence[Trajectory], settings: BatchSettings) -> Advantages:
    """Advantages of all turns, before any is dropped: what cannot be trained on still tells how good the others were.

    Failed members are not part of a group; a group with one trajectory left has nothing to compare it with.

    Raises:
        DataError: a trajectory comes twice.
        ConfigurationError: GiGPO without any state to compare turns at.
    """
    groups = groups_of(trajectories, settings.penalty)
    values, metrics = ESTIMATORS[settings.advantage.name](groups, settings.advantage)
    without = frozenset(group.group_id for group, own in zip(groups, values, strict=True) if not own.any())
    every = np.concatenate([np.zeros(0), *values])
    penalties = np.concatenate([np.zeros(0), *(group.penalties for group in groups)])
    turns = {
        "advantage/turn_absmean": _mean(np.abs(every)),
        "groups/count": float(len(groups)),
        "groups/zero_advantage_fraction": len(without) / max(len(groups), 1),
        "penalty/turns": float(np.count_nonzero(penalties)),
        "penalty/mean": _mean(penalties),
    }
    by_turn = {
        (group.trajectories[member].trajectory_id, turn.index): float(value)
        for group, own in zip(groups, values, strict=True)
        for member, turn, value in zip(group.member, group.turns, own, strict=True)
    }
    return Advantages(by_turn, without, merged(estimator=metrics, turns=turns))


def group_mean(groups: Sequence[Group], settings: GroupMean) -> tuple[list[Values], dict[str, float]]:
    """A = (S - mean_group S) / s, with s = std_group S + 1e-4 (GRPO, arXiv 2402.03300, eq. for outcome
    supervision), std over the batch of all centered scores, or 1 (Dr. GRPO, arXiv 2503.20783).

    S is the trajectory's reward less the turn's penalty. Every trajectory counts once.
    """
    centered = [_centered(group) for group in groups]
    if settings.scale == "none":
        return centered, {}
    if settings.scale == "group_std":
        pairs = zip(groups, centered, strict=True)
        kind = settings.deviation
        return [standardized(own, group.weights, len(group.rewards), kind) for group, own in pairs], {}
    whole = _spread(groups, centered, settings.deviation)
    return [own / (whole + EPSILON) for own in centered], {}


def standardized(centered: Values, weights: Values, members: int, kind: Deviation) -> Values:
    """Return (N,) scores less the mean of their group over its standard deviation + 1e-4.

    Args:
        centered: (N,) scores less the mean of their group.
        weights: (N,), which add up to 1 for each member of the group.
    """
    return centered / (deviation(float(weights @ centered**2), members, kind) + EPSILON)


def rloo(groups: Sequence[Group], settings: RLOO) -> tuple[list[Values], dict[str, float]]:
    """A = S - the mean score of the group's other trajectories (arXiv 2402.14740, eq. 8)."""
    found = []
    for group in groups:
        others = len(group.rewards) - 1
        if others == 0 or all_equal(group.scores):
            found.append(np.zeros(len(group.turns)))
            continue
        scores = group.trajectory_scores
        found.append(group.scores - ((scores.sum() - scores) / others)[group.member])
    return found, {}


def _centered(group: Group) -> Values:
    """(N,) exactly 0 where all scored the same, which sums of floats would not give."""
    if len(group.rewards) == 1 or all_equal(group.scores):
        return np.zeros(len(group.turns))
    return group.scores - group.trajectory_scores.mean()


def _spread(groups: Sequence[Group], centered: Sequence[Values], kind: Deviation) -> float:
    """The standard deviation of `centered`, every trajectory counted once; 0 where there is nothing to compare."""
    squares = sum(float(group.weights @ own**2) for group, own in zip(groups, centered, strict=True))
    return deviation(squares, sum(len(group.rewards) for group in groups), kind)


def _mean(values: Values) -> float:
    return float(values.mean()) if values.size else 0.0


ESTIMATORS: dict[str, Callable[[Sequence[Group], Any], tuple[list[Values], dict[str, float]]]] = {
    "group_mean": group_mean,
    "rloo": rloo,
    "gigpo": gigpo,
}
"""By the name of their settings: groups to the advantages of their turns, and metrics of the estimator's own."""
