"""From rollouts to training samples: their advantages, and which groups say nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from components.batches.advantages import EPSILON
from components.vla_rl.gae import answer_advantages
from components.vla_rl.settings import GAE, EpisodeGroupMean
from components.vla_rl.table import Answer, AnswerSample, with_advantage


@dataclass(frozen=True)
class RobotBatch:
    """drops: answers that are not trained on, by reason."""

    samples: list[AnswerSample]
    drops: Counter[str]
    metrics: dict[str, float]


def build_batch(answers: Sequence[Answer], advantage: EpisodeGroupMean | GAE) -> RobotBatch:
    """The answers with their advantages; with GAE all of them, with values to learn."""
    groups = _returns(answers)
    if isinstance(advantage, GAE):
        advantages, targets, metrics = answer_advantages(answers, advantage)
        rows = zip(answers, advantages.tolist(), targets.tolist(), strict=True)
        samples = [with_advantage(*row) for row in rows]
    else:
        samples, metrics = _compared(answers, groups)
    earned = [value for group in groups.values() for value in group.values()]
    metrics |= {
        "reward": float(np.mean(earned)),
        "success": sum(answer.done and not answer.truncated for answer in answers) / len(earned),
        "groups/count": float(len(groups)),
        "rollouts/planned": float(len(earned)),
        "answers/per_episode": len(answers) / len(earned),
        "answers/trained": float(len(samples)),
    }
    drops = Counter({"group_agrees": len(answers) - len(samples)})
    return RobotBatch(samples, +drops, metrics)


def _returns(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """The sum of an episode's rewards, by group and episode."""
    returns: dict[str, dict[str, float]] = {}
    for answer in answers:
        group = returns.setdefault(answer.group_id, {})
        group[answer.episode_id] = group.get(answer.episode_id, 0.0) + answer.reward
    return returns


def _compared(
    answers: Sequence[Answer], returns: dict[str, dict[str, float]]
) -> tuple[list[AnswerSample], dict[str, float]]:
    """Each answer of an episode with its advantage A = (R - mean_group R) / (std_group R + 1e-4) (GRPO, arXiv
    2402.03300): R is the sum of the episode's rewards, std the population's.

    The answers of a group whose episodes all earned the same are left out.
    """
    agreeing = {name for name, group in returns.items() if len(set(group.values())) == 1}
    scales = {
        name: (float(np.mean(earned)), float(np.std(earned)) + EPSILON)
        for name, group in returns.items()
        if (earned := list(group.values()))
    }
    samples = []
    for answer in answers:
        if answer.group_id not in agreeing:
            mean, deviation = scales[answer.group_id]
            samples.append(with_advantage(answer, (returns[answer.group_id][answer.episode_id] - mean) / deviation))
    return samples, {"groups/zero_advantage_fraction": len(agreeing) / len(returns)}
