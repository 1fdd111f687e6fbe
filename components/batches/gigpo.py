"""Group-in-group policy optimization (GiGPO, arXiv 2505.10978): trajectories in groups, and turns at one state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from armature.components.batches.anchors import Labels, anchor_labels
from armature.components.batches.groups import Group, Values, deviation
from armature.components.batches.settings import GiGPO, MeanNorm, MeanStdNorm
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.rollouts import all_equal

EPSILON = 1e-6


def gigpo(groups: Sequence[Group], settings: GiGPO) -> tuple[list[Values], dict[str, float]]:
    """A = A^E + w A^S: the trajectory's reward and the turn's discounted return, each against its own group.

    Raises:
        ConfigurationError: no turn names the state that it began at.
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
    step = [step_advantages(group, own, settings) for group, own in zip(groups, labels, strict=True)]
    total = [first + settings.step_weight * second for first, second in zip(episode, step, strict=True)]
    return total, _metrics(episode, step, labels)


def episode_advantages(group: Group, settings: GiGPO) -> Values:
    """(N,) A^E = norm(S - mean S), S the trajectory's reward less the turn's penalty (eq. 3).

    Statistics are over trajectories, each of which counts once however long it is, or over rows, that is turns. The
    trajectory that is alone in its group has no baseline and gets 0; the authors' code gives it its plain score.
    """
    if len(group.rewards) == 1:
        return np.zeros(len(group.turns))
    rows = settings.statistics == "rows"
    return normalized(group.scores, np.ones(len(group.turns)) if rows else group.weights, settings.norm)


def step_advantages(group: Group, labels: Labels, settings: GiGPO) -> Values:
    """(N,) A^S = norm(G - mean G) over the turns at the same state, 0 for a turn that is alone there (eq. 7).

    G_t = r_t + gamma G_{t+1} within the trajectory; a turn's penalty is then subtracted from its own G alone.
    """
    returns = discounted_returns(group, settings.gamma) - group.penalties
    advantages = np.zeros(len(returns))
    for label in np.flatnonzero(np.bincount(labels) > 1):
        there = labels == label
        advantages[there] = normalized(returns[there], np.ones(int(there.sum())), settings.norm)
    return advantages


def discounted_returns(group: Group, gamma: float) -> Values:
    """(N,) G_t = r_t + gamma G_{t+1}, from each turn to the end of its trajectory."""
    returns = np.zeros(len(group.turns))
    later = 0.0
    for row in reversed(range(len(group.turns))):
        last = row + 1 == len(group.turns) or group.member[row + 1] != group.member[row]
        later = group.turns[row].reward + (0.0 if last else gamma * later)
        returns[row] = later
    return returns


def normalized(values: Values, weights: Values, norm: MeanNorm | MeanStdNorm) -> Values:
    """(N,) `values` less their weighted mean, over max(std, floor) + 1e-6 if `norm` says so.

    std^2 = sum w d^2 / (sum w - 1) of the sample, / sum w of the population: with weights of 1 over the rows, with
    weights that sum to 1 per trajectory over the trajectories. Equal values give exactly 0.
    """
    if all_equal(values):
        return np.zeros(len(values))
    centered = values - np.average(values, weights=weights)
    if isinstance(norm, MeanNorm):
        return centered
    spread = deviation(float(weights @ centered**2), float(weights.sum()), norm.deviation)
    return centered / (max(spread, norm.std_floor) + EPSILON)


def _metrics(episode: Sequence[Values], step: Sequence[Values], labels: Sequence[Labels]) -> dict[str, float]:
    sizes = np.concatenate([np.zeros(0, dtype=np.int64), *(np.bincount(own) for own in labels)])
    if not sizes.size:
        return {}
    return {
        "advantage/episode_absmean": float(np.abs(np.concatenate(episode)).mean()),
        "advantage/step_absmean": float(np.abs(np.concatenate(step)).mean()),
        "anchors/size": float(sizes.mean()),
        "anchors/size_max": float(sizes.max()),
        "anchors/singleton_fraction": float((sizes == 1).mean()),
    }
