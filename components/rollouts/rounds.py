"""Dynamic sampling: further tasks are played until enough groups tell good from bad (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from armature.components.batches.groups import groups_that_differ
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.rollouts.settings import RolloutSettings


async def play_rounds(play: Callable[[int], Awaitable[GenerateOutputs]], plan: RolloutSettings) -> GenerateOutputs:
    """Everything that was played, round after round, `play(number)` being round `number` from 0.

    A round is played whole, and whether another follows depends on the rewards alone: however fast each rollout
    was, the same rewards lead to the same tasks.
    """
    outputs = await play(0)
    for number in range(1, plan.max_rounds):
        if len(_differing(outputs)) >= plan.groups_per_step:
            break
        further = await play(number)
        outputs = GenerateOutputs(
            (*outputs.trajectories, *further.trajectories), (*outputs.failures, *further.failures)
        )
    return outputs


@dataclass(frozen=True)
class SelectedGroups:
    """The rollouts that a step trains on. `drops` counts the other rollouts by reason; `metrics` counts groups."""

    outputs: GenerateOutputs
    drops: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def choose_groups(outputs: GenerateOutputs, plan: RolloutSettings) -> SelectedGroups:
    """The first `groups_per_step` groups whose rewards differ; all groups where only one round may be played."""
    if plan.max_rounds == 1:
        return SelectedGroups(outputs)
    differing = _differing(outputs)
    chosen, surplus = set(differing[: plan.groups_per_step]), set(differing[plan.groups_per_step :])
    groups = {one.group_id for one in outputs.trajectories} | {one.group_id for one in outputs.failures}
    kept = tuple(one for one in outputs.trajectories if one.group_id in chosen)
    n_surplus = sum(one.group_id in surplus for one in outputs.trajectories)
    drops = {"surplus_group": n_surplus, "equal_rewards_group": len(outputs.trajectories) - len(kept) - n_surplus}
    metrics = {
        "groups/rounds": len(groups) / plan.groups_per_step,
        "groups/played": float(len(groups)),
        "groups/equal_rewards": float(len(groups) - len(differing)),
        "groups/surplus": float(len(surplus)),
    }
    found = {reason: count for reason, count in drops.items() if count}
    return SelectedGroups(replace(outputs, trajectories=kept), found, metrics)


def _differing(outputs: GenerateOutputs) -> list[str]:
    return groups_that_differ((one.group_id, one.reward) for one in outputs.trajectories)
