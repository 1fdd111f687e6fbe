"""Advantage estimators: score each turn relative to the other rollouts of the same task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import numpy.typing as npt

from armature.components.contracts.batches import TurnAdvantages
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.metrics import merged
from armature.components.contracts.rollouts import Trajectory, Turn, all_equal
from armature.components.rollouts.settings import (
    RLOO,
    AdmissibleAnchors,
    BatchSettings,
    Deviation,
    ExactAnchors,
    GiGPO,
    GroupMean,
    MeanNorm,
    MeanStdNorm,
    PenaltySettings,
    SimilarAnchors,
)

# --- Groups of rollouts as arrays ---

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Group:
    """The N turns of the M trajectories of one group, trajectory by trajectory.

    Attributes:
        member: (N,) int64, index in `trajectories` of each turn's trajectory.
        penalties: (N,), penalty of each turn for an invalid action.
        rewards: (M,), reward of each trajectory, without penalties.
        scores: (N,), for each turn the reward of its whole trajectory minus the turn's own penalty.
    """

    group_id: str
    trajectories: tuple[Trajectory, ...]
    turns: tuple[Turn, ...]
    member: npt.NDArray[np.int64]
    penalties: Values
    rewards: Values
    scores: Values

    @property
    def weights(self) -> Values:
        """Weight of each turn, shape (N,): 1 / (number of turns in its trajectory). So all trajectories count equally
        in a weighted mean."""
        return 1.0 / np.bincount(self.member)[self.member]

    @property
    def trajectory_scores(self) -> Values:
        """Mean of `scores` over the turns of each trajectory, shape (M,)."""
        return self.rewards - np.bincount(self.member, self.penalties * self.weights, len(self.rewards))


def deviation(squares: float, count: float, kind: Deviation) -> float:
    """Return the sample or population standard deviation of `count` numbers.

    `squares` is the sum of the squared distances of these numbers from their mean.
    """
    return float(np.sqrt(squares / max(1.0, count - (kind == "sample"))))


def groups_that_differ(rewards: Iterable[tuple[str, float]]) -> list[str]:
    """Return the ids of the groups whose members have different rewards, in the order of their first member.

    Args:
        rewards: one pair for each member: the id of its group and its reward.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for group_id, reward in rewards:
        groups[group_id].append(reward)
    return [group_id for group_id, earned in groups.items() if not all_equal(earned)]


def groups_of(trajectories: Sequence[Trajectory], penalty: PenaltySettings) -> list[Group]:
    """Sort trajectories into groups by their group id, in order of appearance. Trajectories with a reward that is not
    finite are left out.

    Raises:
        DataError: a trajectory id occurs twice; it would count twice in its group's mean.
    """
    members: dict[str, list[Trajectory]] = defaultdict(list)
    seen: set[str] = set()
    for trajectory in trajectories:
        if trajectory.trajectory_id in seen:
            raise DataError(
                "a trajectory occurs twice and would count double in its group",
                code="trajectory_repeated",
                where=trajectory.trajectory_id,
                remedy="pass every rollout once",
            )
        seen.add(trajectory.trajectory_id)
        if np.isfinite(trajectory.reward):
            members[trajectory.group_id].append(trajectory)
    return [_group(group_id, tuple(group), penalty) for group_id, group in members.items()]


def _group(group_id: str, trajectories: tuple[Trajectory, ...], penalty: PenaltySettings) -> Group:
    costs = {None: 0.0, "format": penalty.format, "inadmissible": penalty.inadmissible}
    turns = tuple(turn for trajectory in trajectories for turn in trajectory.turns)
    member = np.repeat(np.arange(len(trajectories)), [len(trajectory.turns) for trajectory in trajectories])
    penalties = np.array([costs[turn.action_defect] for turn in turns], dtype=np.float64)
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
    return Group(group_id, trajectories, turns, member, penalties, rewards, rewards[member] - penalties)


# --- Turns that began at the same state ---

Labels = npt.NDArray[np.int64]


def anchor_labels(turns: Sequence[Turn], anchor: ExactAnchors | AdmissibleAnchors | SimilarAnchors) -> Labels:
    """Return one state number for each turn, shape (N,). Turns that began at the same state have the same number. A
    turn without a state key has a number of its own."""
    if isinstance(anchor, SimilarAnchors):
        keys: list[Hashable] = list(similar([turn.anchor_key for turn in turns], anchor.threshold))
    elif isinstance(anchor, AdmissibleAnchors):
        keys = [None if turn.anchor_key is None else (turn.anchor_key, turn.admissible_key) for turn in turns]
    else:
        keys = [turn.anchor_key for turn in turns]
    numbers: dict[Hashable, int] = {}
    named = (place if key is None else key for place, key in enumerate(keys))
    return np.array([numbers.setdefault(key, len(numbers)) for key in named], dtype=np.int64)


def similar(texts: Sequence[str | None], threshold: float) -> list[str | None]:
    """Cluster similar texts, and return for each text the first text of its cluster.

    A text joins the earliest cluster whose first text is similar to it: their ratio is at least `threshold`.

    difflib's heuristic that ignores frequent characters is off: from 200 characters on, it can make nearly equal texts
    look entirely different.
    """
    firsts: list[str] = []
    first_of: dict[str, str] = {}
    matcher: SequenceMatcher[str] = SequenceMatcher(None, autojunk=False)
    for text in texts:
        if text is None or text in first_of:
            continue
        matcher.set_seq2(text)
        for first in firsts:
            matcher.set_seq1(first)
            if (
                matcher.real_quick_ratio() >= threshold  # two cheap upper bounds first
                and matcher.quick_ratio() >= threshold
                and matcher.ratio() >= threshold
            ):
                first_of[text] = first
                break
        else:
            firsts.append(text)
            first_of[text] = text
    return [None if text is None else first_of[text] for text in texts]


# --- GiGPO: group-in-group policy optimization (arXiv 2505.10978) ---

GIGPO_EPSILON = 1e-6


def gigpo(groups: Sequence[Group], settings: GiGPO) -> tuple[list[Values], dict[str, float]]:
    """Return GiGPO's advantages, one (N,) array per group, and the estimator's metrics.

    A = A^E + w A^S, where w is `settings.step_weight`. A^E compares the trajectory's reward with the other
    trajectories of the group (`episode_advantages`). A^S compares the turn's discounted return with the other turns
    that began at the same state (`step_advantages`).

    Raises:
        ConfigurationError: no turn has an anchor key, which names the state that the turn began at.
    """
    if groups and not any(turn.anchor_key for group in groups for turn in group.turns):
        raise ConfigurationError(
            "GiGPO compares turns that began at the same state, and no observation names its state",
            code="anchor_key_missing",
            where="batches.advantage",
            remedy="use an environment whose observations have an anchor_key, or the advantage group_mean",
        )
    episode = [episode_advantages(group, settings) for group in groups]
    labels = [anchor_labels(group.turns, settings.anchor) for group in groups]
    step = [step_advantages(group, states, settings) for group, states in zip(groups, labels, strict=True)]
    total = [first + settings.step_weight * second for first, second in zip(episode, step, strict=True)]
    return total, _metrics(episode, step, labels)


def episode_advantages(group: Group, settings: GiGPO) -> Values:
    """Return the trajectory-level advantages A^E = norm(S - mean S) of the turns, shape (N,) (GiGPO eq. 3).

    S is the trajectory's reward minus the turn's penalty. With `settings.statistics` = "trajectories", each trajectory
    counts once in the mean, however long it is; with "rows", each turn counts once. A trajectory that is alone in its
    group has no baseline and gets 0; the authors' code gives it its unnormalized score.
    """
    if len(group.rewards) == 1:
        return np.zeros(len(group.turns))
    rows = settings.statistics == "rows"
    return normalized(group.scores, np.ones(len(group.turns)) if rows else group.weights, settings.norm)


def step_advantages(group: Group, labels: Labels, settings: GiGPO) -> Values:
    """Return the turn-level advantages A^S = norm(G - mean G), shape (N,) (GiGPO eq. 7).

    G_t = r_t + gamma G_{t+1} is the discounted return of a turn within its trajectory. A turn's penalty is subtracted
    afterwards, so it lowers only the G of this turn, not the G of earlier turns. The mean and the norm are over the
    turns that began at the same state, that is, turns with equal `labels`. A turn that is alone at its state gets 0.
    """
    returns = discounted_returns(group, settings.gamma) - group.penalties
    advantages = np.zeros(len(returns))
    for label in np.flatnonzero(np.bincount(labels) > 1):
        same_state = labels == label
        advantages[same_state] = normalized(returns[same_state], np.ones(int(same_state.sum())), settings.norm)
    return advantages


def discounted_returns(group: Group, gamma: float) -> Values:
    """Return the discounted return G_t = r_t + gamma G_{t+1} of each turn, shape (N,). After the last turn of a
    trajectory, G is 0."""
    returns = np.zeros(len(group.turns))
    later = 0.0
    for row in reversed(range(len(group.turns))):
        last = row + 1 == len(group.turns) or group.member[row + 1] != group.member[row]
        later = group.turns[row].reward + (0.0 if last else gamma * later)
        returns[row] = later
    return returns


def normalized(values: Values, weights: Values, norm: MeanNorm | MeanStdNorm) -> Values:
    """Return `values` minus their weighted mean, shape (N,). With `MeanStdNorm`, divide by max(std, floor) + 1e-6 too.

    With w the weights and d the distances from the mean, the variance is sum(w d^2) / (sum(w) - 1) for the sample
    deviation and sum(w d^2) / sum(w) for the population deviation. With weights of 1 the statistics are over the rows;
    with weights that sum to 1 per trajectory they are over the trajectories. Equal values give exactly 0.
    """
    if all_equal(values):
        return np.zeros(len(values))
    centered = values - np.average(values, weights=weights)
    if isinstance(norm, MeanNorm):
        return centered
    spread = deviation(float(weights @ centered**2), float(weights.sum()), norm.deviation)
    return centered / (max(spread, norm.std_floor) + GIGPO_EPSILON)


def _metrics(episode: Sequence[Values], step: Sequence[Values], labels: Sequence[Labels]) -> dict[str, float]:
    sizes = np.concatenate([np.zeros(0, dtype=np.int64), *(np.bincount(states) for states in labels)])
    if not sizes.size:
        return {}
    return {
        "advantage/episode_absmean": float(np.abs(np.concatenate(episode)).mean()),
        "advantage/step_absmean": float(np.abs(np.concatenate(step)).mean()),
        "anchors/size": float(sizes.mean()),
        "anchors/size_max": float(sizes.max()),
        "anchors/singleton_fraction": float((sizes == 1).mean()),
    }


# --- Advantages of a step, and the estimators that compare whole trajectories ---

EPSILON = 1e-4


@dataclass(frozen=True)
class Advantages:
    """The advantages of all turns of a step.

    Attributes:
        by_turn: advantage of each turn, by trajectory id and turn index.
        without_gradient: ids of the groups in which every turn has advantage 0.
        metrics: metrics of the step and of the estimator, by name.
    """

    by_turn: TurnAdvantages
    without_gradient: frozenset[str]
    metrics: dict[str, float]


def turn_advantages(trajectories: Sequence[Trajectory], settings: BatchSettings) -> Advantages:
    """Return the advantages of all turns, including turns that cannot be trained on, whose rewards still count in
    means.

    Failed rollouts are not part of a group. A group with a single trajectory has no baseline, and its advantage is 0.

    Raises:
        DataError: a trajectory occurs twice.
        ConfigurationError: the advantage is GiGPO and no turn has a state key.
    """
    groups = groups_of(trajectories, settings.penalty)
    values, metrics = ESTIMATORS[settings.advantage.name](groups, settings.advantage)
    without = frozenset(group.group_id for group, row in zip(groups, values, strict=True) if not row.any())
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
        for group, row in zip(groups, values, strict=True)
        for member, turn, value in zip(group.member, group.turns, row, strict=True)
    }
    return Advantages(by_turn, without, merged(estimator=metrics, turns=turns))


def group_mean(groups: Sequence[Group], settings: GroupMean) -> tuple[list[Values], dict[str, float]]:
    """Return the advantages A = (S - mean_group S) / s, one (N,) array per group, and no metrics.

    S is the trajectory's reward minus the turn's penalty. Every trajectory counts once. `settings.scale` chooses s:

    - "group_std": the standard deviation of S in the group + 1e-4 (GRPO, arXiv 2402.03300, equation for outcome
      supervision).
    - "batch_std": the standard deviation of the centered scores of the whole batch + 1e-4.
    - "none": 1 (Dr. GRPO, arXiv 2503.20783).
    """
    centered = [_centered(group) for group in groups]
    if settings.scale == "none":
        return centered, {}
    if settings.scale == "group_std":
        pairs = zip(groups, centered, strict=True)
        kind = settings.deviation
        return [standardized(row, group.weights, len(group.rewards), kind) for group, row in pairs], {}
    whole = _spread(groups, centered, settings.deviation)
    return [row / (whole + EPSILON) for row in centered], {}


def standardized(centered: Values, weights: Values, members: int, kind: Deviation) -> Values:
    """Return centered scores divided by (their group's standard deviation + 1e-4), shape (N,).

    Args:
        centered: (N,) scores minus the mean of their group.
        weights: (N,) weights of the scores, which sum to 1 for each member of the group.
        members: the number of members of the group.
        kind: the sample or the population standard deviation.
    """
    return centered / (deviation(float(weights @ centered**2), members, kind) + EPSILON)


def rloo(groups: Sequence[Group], settings: RLOO) -> tuple[list[Values], dict[str, float]]:
    """Return RLOO's advantages, one (N,) array per group, and no metrics (arXiv 2402.14740, eq. 8).

    The advantage of a turn is S minus the mean score of the group's other trajectories. S is the trajectory's reward
    minus the turn's penalty.
    """
    advantages = []
    for group in groups:
        others = len(group.rewards) - 1
        if others == 0 or all_equal(group.scores):
            advantages.append(np.zeros(len(group.turns)))
            continue
        scores = group.trajectory_scores
        advantages.append(group.scores - ((scores.sum() - scores) / others)[group.member])
    return advantages, {}


def _centered(group: Group) -> Values:
    """Return the scores of a group's turns minus the group's mean score, shape (N,).

    Equal scores give exactly 0; subtracting a mean computed in floating point could leave rounding errors.
    """
    if len(group.rewards) == 1 or all_equal(group.scores):
        return np.zeros(len(group.turns))
    return group.scores - group.trajectory_scores.mean()


def _spread(groups: Sequence[Group], centered: Sequence[Values], kind: Deviation) -> float:
    """Return the standard deviation of the centered scores of all groups together, in which every trajectory counts
    once. It is 0 if there are no groups.
    """
    squares = sum(float(group.weights @ row**2) for group, row in zip(groups, centered, strict=True))
    return deviation(squares, sum(len(group.rewards) for group in groups), kind)


def _mean(values: Values) -> float:
    return float(values.mean()) if values.size else 0.0


ESTIMATORS: dict[str, Callable[[Sequence[Group], Any], tuple[list[Values], dict[str, float]]]] = {
    "group_mean": group_mean,
    "rloo": rloo,
    "gigpo": gigpo,
}
"""Advantage estimators by the name of their settings.

An estimator takes groups and its settings. It returns a list with one array of advantages per group, shape (N,), and
the estimator's metrics by name.
"""
