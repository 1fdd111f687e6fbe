"""What an episode earns, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from math import tanh
from statistics import fmean

from armature.components.environments.libero.progress import GoalProgress
from armature.components.vla_rl.settings import PotentialShaping, ProgressReward, SuccessReward

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
