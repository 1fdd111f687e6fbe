"""From rollouts to training samples: their advantages, and which groups say nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp

import numpy as np

from armature.components.batches.advantages import standardized
from armature.components.batches.build import BuiltBatch
from armature.components.batches.groups import groups_that_differ
from armature.components.batches.settings import Deviation
from armature.components.contracts.metrics import merged, metrics_below
from armature.components.contracts.rollouts import Failure
from armature.components.vla_rl.gae import answer_advantages
from armature.components.vla_rl.settings import GAE, EpisodeGroupMean, RewardWeighted
from armature.components.vla_rl.table import Answer, AnswerSample, with_advantage


def build_batch(
    answers: Sequence[Answer],
    advantage: EpisodeGroupMean | GAE | RewardWeighted,
    wanted: int | None = None,
    failures: Sequence[Failure] = (),
    earlier: Sequence[Answer] = (),
) -> BuiltBatch[AnswerSample]:
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


def differing_groups(answers: Sequence[Answer]) -> list[str]:
    """Return the groups, in order, whose episodes did not all earn the same."""
    groups = _returns(answers).items()
    return groups_that_differ((name, earned) for name, group in groups for earned in group.values())


def _returns(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """The sum of an episode's rewards, by group and episode."""
    returns: dict[str, dict[str, float]] = {}
    for answer in answers:
        group = returns.setdefault(answer.group_id, {})
        group[answer.episode_id] = group.get(answer.episode_id, 0.0) + answer.reward
    return returns


def _weighted(answers: Sequence[Answer], settings: RewardWeighted) -> list[AnswerSample]:
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
    answers: Sequence[Answer], returns: dict[str, dict[str, float]], deviation: Deviation
) -> list[AnswerSample]:
    """Give each answer of the groups in `returns` its advantage, see `standardized`: an episode is scored by the sum of
    its rewards. Each group has two episodes or more."""
    advantages: dict[str, float] = {}
    for group in returns.values():
        earned = np.array(list(group.values()))
        values = standardized(earned - earned.mean(), np.ones(len(earned)), len(earned), deviation)
        advantages |= zip(group, values.tolist(), strict=True)
    return [with_advantage(each, advantages[each.episode_id]) for each in answers if each.group_id in returns]
