"""Generalized advantage estimation over the chunks of an episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from armature.components.batches.advantages import EPSILON
from armature.components.contracts.errors import DataError
from armature.components.vla_rl.settings import GAE
from armature.components.vla_rl.table import Answer

Values = NDArray[np.float64]


def gae(rewards: Sequence[float], values: Sequence[float], last_value: float, gamma: float, lam: float) -> Values:
    """(K,): A_k = d_k + gamma lam A_(k+1) with d_k = r_k + gamma V_(k+1) - V_k (Schulman et al., arXiv 1506.02438).

    Args:
        rewards, values: (K,), r and V. last_value: V_K, of what follows: 0 after an episode that has terminated.
    """
    following = [*values[1:], last_value]
    advantages, advantage = np.zeros(len(values)), 0.0
    for k in reversed(range(len(values))):
        advantage = rewards[k] + gamma * following[k] - values[k] + gamma * lam * advantage
        advantages[k] = advantage
    return advantages


def answer_advantages(answers: Sequence[Answer], settings: GAE) -> tuple[Values, Values, dict[str, float]]:
    """Of every answer the advantage, less the mean of all and in their standard deviations (+ 1e-4), and what its value
    is to become, A + V before that; then metrics.

    Raises:
        DataError: an answer has no value.
    """
    episodes: dict[str, list[int]] = {}
    for row, answer in enumerate(answers):
        episodes.setdefault(answer.episode_id, []).append(row)
    values = np.array([_value(answer) for answer in answers])
    advantages = np.zeros(len(answers))
    for rows in episodes.values():
        rewards, last = [answers[row].reward for row in rows], answers[rows[-1]].last_value
        advantages[rows] = gae(rewards, values[rows].tolist(), last, settings.gamma, settings.gae_lambda)
    targets = advantages + values
    metrics = {"value/mean": float(values.mean()), "return/mean": float(targets.mean())}
    if (spread := float(targets.var())) > 0:
        metrics["value/explained_variance"] = 1.0 - float(advantages.var()) / spread
    return (advantages - advantages.mean()) / (advantages.std() + EPSILON), targets, metrics


def _value(answer: Answer) -> float:
    if answer.value is None:
        raise DataError(
            "the answer has no value, which advantage gae needs",
            code="value_missing",
            where=f"{answer.episode_id}, chunk {answer.chunk}",
            remedy="collect the rollouts with a value head",
        )
    return answer.value
