"""From rollouts to training samples: their advantages, and which groups say nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp, tanh
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import DataError
from armature.components.contracts.metrics import merged, metrics_below
from armature.components.contracts.rollouts import Failure
from armature.components.robots.libero.progress import GoalProgress
from armature.components.robots.rl.settings import (
    GAE,
    EpisodeGroupMean,
    PotentialShaping,
    ProgressReward,
    RewardWeighted,
    SuccessReward,
)
from armature.components.robots.rl.table import ActionChunk, ActionChunkSample, with_advantage
from armature.components.rollouts.batches.advantages import EPSILON, groups_that_differ, standardized
from armature.components.rollouts.batches.table import BuiltBatch
from armature.components.rollouts.settings import Deviation

# What an episode earns, chunk by chunk.

REACH, GRASP, PLACE, SHARPNESS = 0.3, 0.2, 0.3, 5.0
"""Shares of a predicate that does not hold yet, 0.8 in all; per meter, how fast nearness falls."""


def potential(goals: Sequence[GoalProgress]) -> float:
    """How far the task has come, from 0 to 1, which is the goal: the mean over its predicates of 1 where it holds, else

        0.3 (1 - tanh(5 reach)) + 0.2 [grasped] + 0.3 (1 - tanh(5 place)).

    What goes nowhere has no third term; what the gripper holds is reached.
    """
    return fmean(1.0 if goal.holds else _part(goal) for goal in goals)


def chunk_rewards(
    reward: SuccessReward | ProgressReward | PotentialShaping,
    chunks: int,
    progress: Sequence[Sequence[GoalProgress]],
    solved: bool,
    gamma: float,
    goes_on: bool,
) -> list[float]:
    """(chunks,): 1 for the chunk that solved the task, and what `reward` adds.

    Potential-based shaping (Ng, Harada, Russell, ICML 1999) adds F_k = weight (gamma Phi(s_(k+1)) - Phi(s_k)) with
    Phi = 0 after the end. The discounted sum over an episode is - weight Phi(s_0), whatever was done, so the best
    policies are those of success alone. An episode that goes on after its last chunk keeps Phi of what follows.

    Args:
        progress: (chunks + 1,): before each chunk and after the last; empty for success alone.
        gamma: discount per chunk. goes_on: truncated, and valued by what is seen last.
    """
    rewards = [0.0] * chunks
    rewards[-1] = float(solved)
    if isinstance(reward, SuccessReward):
        return rewards
    potentials = [potential(each) for each in progress]
    if isinstance(reward, ProgressReward):
        rewards[-1] += 0.0 if solved else reward.weight * potentials[-1]
        return rewards
    if not goes_on:
        potentials[-1] = 0.0
    return [
        earned + reward.weight * (gamma * after - before)
        for earned, before, after in zip(rewards, potentials, potentials[1:], strict=False)
    ]


def _part(goal: GoalProgress) -> float:
    reached = 1.0 if goal.grasped else _near(goal.reach)
    placed = 0.0 if goal.place is None else _near(goal.place)
    return REACH * reached + GRASP * goal.grasped + PLACE * placed


def _near(meters: float) -> float:
    return 1.0 - tanh(SHARPNESS * meters)


# Generalized advantage estimation over the chunks of an episode.

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


def answer_advantages(answers: Sequence[ActionChunk], settings: GAE) -> tuple[Values, Values, dict[str, float]]:
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


def _value(answer: ActionChunk) -> float:
    if answer.value is None:
        raise DataError(
            "the answer has no value, which advantage gae needs",
            code="value_missing",
            where=f"{answer.episode_id}, chunk {answer.chunk}",
            remedy="collect the rollouts with a value head",
        )
    return answer.value


def build_batch(
    answers: Sequence[ActionChunk],
    advantage: EpisodeGroupMean | GAE | RewardWeighted,
    wanted: int | None = None,
    failures: Sequence[Failure] = (),
    earlier: Sequence[ActionChunk] = (),
) -> BuiltBatch[ActionChunkSample]:
    """The answers with their advantages; with GAE all of them, with values to learn; where they are weighed by rewards,
    these weights are their advantages.

    Args:
        earlier: answers of other steps, which are weighed by rewards as well, and counted nowhere else.
        wanted: the first so many groups whose episodes differ are trained on; None: all of them.
        failures: episodes that have no answers. They are in no group: the others are compared with each other, as in
            `turn_advantages`, and one that is left alone has nothing to be compared with.
    """
    groups = _returns(answers)
    drops: Counter[str] = Counter()
    if isinstance(advantage, GAE):
        advantages, targets, metrics = answer_advantages(answers, advantage)
        rows = zip(answers, advantages.tolist(), targets.tolist(), strict=True)
        samples = [with_advantage(*row) for row in rows]
    elif isinstance(advantage, RewardWeighted):
        samples = _weighted([*earlier, *answers], advantage)
        own = {each.episode_id for each in answers}
        replayed = sum(each.episode_id not in own for each in samples)
        drops["weightless_episode" if advantage.beta else "unsolved_episode"] = len(answers) - len(samples) + replayed
        metrics = {"answers/replayed": float(replayed)} if earlier else {}
    else:
        differing = differing_groups(answers)
        chosen, surplus = set(differing[:wanted]), set(differing) - set(differing[:wanted])
        compared = {name: group for name, group in groups.items() if name in chosen}
        samples = _compared(answers, compared, advantage.deviation)
        drops["surplus_group"] = sum(each.group_id in surplus for each in answers)
        drops["group_agrees"] = len(answers) - len(samples) - drops["surplus_group"]
        metrics = {"groups/zero_advantage_fraction": (len(groups) - len(differing)) / len(groups)}
        if wanted is not None:
            played = groups.keys() | {each.group_id for each in failures}
            metrics |= {"groups/rounds": len(played) / wanted, "groups/surplus": float(len(surplus))}
    earned = [value for group in groups.values() for value in group.values()]
    played_metrics = {
        "reward": float(np.mean(earned)),
        "success": sum(answer.done and not answer.truncated for answer in answers) / len(earned),
        "groups/count": float(len(groups)),
        "rollouts/planned": float(len(earned) + len(failures)),
        "rollouts/failed": float(len(failures)),
        "answers/per_episode": len(answers) / len(earned),
        "answers/trained": float(len(samples)),
    }
    if undecoded := sum(not each.decoded for each in answers):
        played_metrics["answers/undecoded"] = float(undecoded)
    failed = metrics_below("failures", Counter(each.reason for each in failures))
    return BuiltBatch(samples, +drops, merged(advantages=metrics, episodes=played_metrics, failures=failed))


def differing_groups(answers: Sequence[ActionChunk]) -> list[str]:
    """Return the groups, in order, whose episodes did not all earn the same."""
    groups = _returns(answers).items()
    return groups_that_differ((name, earned) for name, group in groups for earned in group.values())


def _returns(answers: Sequence[ActionChunk]) -> dict[str, dict[str, float]]:
    """The sum of an episode's rewards, by group and episode."""
    returns: dict[str, dict[str, float]] = {}
    for answer in answers:
        group = returns.setdefault(answer.group_id, {})
        group[answer.episode_id] = group.get(answer.episode_id, 0.0) + answer.reward
    return returns


def _weighted(answers: Sequence[ActionChunk], settings: RewardWeighted) -> list[ActionChunkSample]:
    """Those that weigh anything as normal float32, which they are stored as; see `RewardWeighted.beta`."""
    earned = {name: value for group in _returns(answers).values() for name, value in group.items()}
    solved = {each.episode_id for each in answers if each.done and not each.truncated}
    best = max(earned.values(), default=0.0)
    weights = {
        name: exp((value - best) / settings.beta) if settings.beta else float(name in solved)
        for name, value in earned.items()
    }
    least = float(np.finfo(np.float32).tiny)
    return [with_advantage(each, weight) for each in answers if (weight := weights[each.episode_id]) >= least]


def _compared(
    answers: Sequence[ActionChunk], returns: dict[str, dict[str, float]], deviation: Deviation
) -> list[ActionChunkSample]:
    """Give each answer of the groups in `returns` its advantage, see `standardized`: an episode is scored by the sum of
    its rewards. Each group has two episodes or more."""
    advantages: dict[str, float] = {}
    for group in returns.values():
        earned = np.array(list(group.values()))
        values = standardized(earned - earned.mean(), np.ones(len(earned)), len(earned), deviation)
        advantages |= zip(group, values.tolist(), strict=True)
    return [with_advantage(each, advantages[each.episode_id]) for each in answers if each.group_id in returns]
