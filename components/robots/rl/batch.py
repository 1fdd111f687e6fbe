"""From rollouts to training samples: rewards, advantages, and the choice of groups to train on."""

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

# --- Reward of an episode, per chunk ---

REACH, GRASP, PLACE, SHARPNESS = 0.3, 0.2, 0.3, 5.0
"""Parameters of `potential` for a goal predicate that does not hold. The first three are the largest contributions of
reaching, grasping and placing the object, together 0.8. The last one scales distances inside tanh, in 1/m."""


def potential(goals: Sequence[GoalProgress]) -> float:
    """Return the progress of a task from 0 to 1 (solved): the mean over its goal predicates.

    A predicate that holds contributes 1, another one

        0.3 (1 - tanh(5 reach)) + 0.2 [grasped] + 0.3 (1 - tanh(5 place)).

    The third term is 0 for an object that has no target place. A grasped object counts as reached (reach = 0).

    Example:
        >>> potential([GoalProgress(holds=True, reach=0.0, grasped=False, place=None)])
        1.0
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
    """Return the reward of each chunk of an episode, (chunks,): 1 for the chunk that solved the task, plus shaping.

    Potential-based shaping (Ng, Harada, Russell, ICML 1999) adds F_k = weight (gamma Phi(s_(k+1)) - Phi(s_k)) with
    Phi = 0 after the end. The discounted sum over an episode is - weight Phi(s_0), whatever the actions were, so the
    best policies are the same as with the success reward alone. If the episode is bootstrapped (`goes_on`), Phi of the
    last observation is kept.

    Args:
        progress: goal progress before each chunk and after the last one, (chunks + 1,); empty for the success reward.
        gamma: discount per chunk.
        goes_on: the episode was truncated and is continued by the value of its last observation.

    Example:
        >>> chunk_rewards(SuccessReward(name="success"), 3, [], solved=True, gamma=1.0, goes_on=False)
        [0.0, 0.0, 1.0]
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


# --- Generalized advantage estimation over the chunks of an episode ---

Values = NDArray[np.float64]


def gae(rewards: Sequence[float], values: Sequence[float], last_value: float, gamma: float, lam: float) -> Values:
    """Return the advantages of an episode's K chunks, (K,): A_k = d_k + gamma lam A_(k+1).

    d_k = r_k + gamma V_(k+1) - V_k (Schulman et al., arXiv 1506.02438).

    Args:
        rewards, values: r and V, (K,).
        last_value: V_K, the value after the last chunk; 0 after an episode that has terminated.

    Example:
        >>> gae([0.0, 1.0], [0.5, 0.5], 0.0, gamma=1.0, lam=1.0).tolist()
        [0.5, 0.5]
    """
    following = [*values[1:], last_value]
    advantages, advantage = np.zeros(len(values)), 0.0
    for k in reversed(range(len(values))):
        advantage = rewards[k] + gamma * following[k] - values[k] + gamma * lam * advantage
        advantages[k] = advantage
    return advantages


def answer_advantages(answers: Sequence[ActionChunk], settings: GAE) -> tuple[Values, Values, dict[str, float]]:
    """Return advantages and value targets of all chunks, and metrics.

    Advantages A are normalized over all chunks: (A - mean) / (standard deviation + 1e-4). Value targets are A + V with
    A before normalization.

    Raises:
        DataError: a chunk has no value.
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
    """Return the training samples of a step: chunks with their advantages (or weights), drop counts and metrics.

    With GAE all chunks are used and have a value target. With the reward-weighted objective the advantage column holds
    the weights. Otherwise only groups whose episodes earned different rewards are used.

    Args:
        wanted: use only this many of the groups whose episodes differ; None: all of them.
        failures: episodes without chunks. They belong to no group: the other episodes of a group are compared with each
            other, as in `turn_advantages`, and an episode that is left alone has no advantage.
        earlier: chunks of previous steps, which are weighted too, but not counted in the metrics of episodes.
    """
    groups = _returns(answers)
    drops: Counter[str] = Counter()
    if isinstance(advantage, GAE):
        advantages, targets, metrics = answer_advantages(answers, advantage)
        rows = zip(answers, advantages.tolist(), targets.tolist(), strict=True)
        samples = [with_advantage(*row) for row in rows]
    elif isinstance(advantage, RewardWeighted):
        samples = _weighted([*earlier, *answers], advantage)
        current = {each.episode_id for each in answers}
        replayed = sum(each.episode_id not in current for each in samples)
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
    perturbed = success_by_perturbation(answers)
    return BuiltBatch(
        samples, +drops, merged(advantages=metrics, episodes=played_metrics, perturbed=perturbed, failures=failed)
    )


def success_by_perturbation(answers: Sequence[ActionChunk]) -> dict[str, float]:
    """Return success rates by perturbation, without one as `success/none`; nothing if no episode was perturbed."""
    solved: dict[str, list[bool]] = {}
    for answer in answers:
        if answer.done:
            solved.setdefault(answer.perturbation or "none", []).append(not answer.truncated)
    return {f"success/{label}": fmean(each) for label, each in solved.items()} if solved.keys() - {"none"} else {}


def differing_groups(answers: Sequence[ActionChunk]) -> list[str]:
    """Return the ids of the groups whose episodes have different sums of rewards, in order of appearance."""
    groups = _returns(answers).items()
    return groups_that_differ((name, earned) for name, group in groups for earned in group.values())


def _returns(answers: Sequence[ActionChunk]) -> dict[str, dict[str, float]]:
    """Return each episode's sum of rewards, in one dict per group: {group id: {episode id: sum}}."""
    returns: dict[str, dict[str, float]] = {}
    for answer in answers:
        group = returns.setdefault(answer.group_id, {})
        group[answer.episode_id] = group.get(answer.episode_id, 0.0) + answer.reward
    return returns


def _weighted(answers: Sequence[ActionChunk], settings: RewardWeighted) -> list[ActionChunkSample]:
    """Return the chunks whose episode has a positive weight, with this weight in the advantage column.

    `RewardWeighted.beta` defines the weights. They are stored as float32, so a weight below the smallest normal float32
    counts as zero.
    """
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
    """Return the chunks of the groups in `returns`, each with the advantage of its episode.

    `returns` has each episode's sum of rewards, see `_returns`. `standardized` compares it with the group's mean. Each
    group has at least two episodes.
    """
    advantages: dict[str, float] = {}
    for group in returns.values():
        earned = np.array(list(group.values()))
        values = standardized(earned - earned.mean(), np.ones(len(earned)), len(earned), deviation)
        advantages |= zip(group, values.tolist(), strict=True)
    return [with_advantage(each, advantages[each.episode_id]) for each in answers if each.group_id in returns]
