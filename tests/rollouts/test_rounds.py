"""Dynamic sampling: how many rounds are played, and which groups a step trains on."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from armature.components.rollouts.sampler import choose_groups, play_rounds
from armature.components.rollouts.settings import RolloutSettings

from .conftest import SAMPLING, a_turn

Rounds = list[list[list[float | None]]]
"""Rewards of rollouts, as `rounds[round][group][member]`. None stands for a rollout that failed."""


def plan(groups: int, max_rounds: int) -> RolloutSettings:
    return RolloutSettings(
        groups_per_step=groups, group_size=2, sampling=SAMPLING, max_rounds=max_rounds, max_staleness=0, seed=0
    )


def outputs_of(groups: list[list[float | None]], first: int) -> GenerateOutputs:
    trajectories, failures = [], []
    for group, rewards in enumerate(groups, first):
        for member, reward in enumerate(rewards):
            names = f"{group}-{member}", f"{group}"
            if reward is None:
                failures.append(Failure(*names, "t", "bad_reward", ""))
            else:
                trajectories.append(Trajectory(*names, "e", "t", "train", (a_turn(0, reward=reward),), False))
    return GenerateOutputs(tuple(trajectories), tuple(failures))


def play(rounds: Rounds, chosen: RolloutSettings) -> tuple[GenerateOutputs, list[int]]:
    asked: list[int] = []

    async def one(number: int) -> GenerateOutputs:
        asked.append(number)
        return outputs_of(rounds[number], number * chosen.groups_per_step)

    return asyncio.run(play_rounds(one, chosen)), asked


EQUAL, DIFFER = [1.0, 1.0], [0.0, 1.0]


def test_rounds_repeat_until_enough_groups_differ():
    rounds: Rounds = [[EQUAL, DIFFER, EQUAL], [DIFFER, EQUAL, [None, 1.0]], [DIFFER, DIFFER, EQUAL], [DIFFER] * 3]
    outputs, asked = play(rounds, plan(3, 10))
    assert asked == [0, 1, 2]
    assert len(outputs.trajectories) == 17 and len(outputs.failures) == 1  # nothing that was played is lost
    chosen = choose_groups(outputs, plan(3, 10))
    assert [one.trajectory_id for one in chosen.outputs.trajectories] == ["1-0", "1-1", "3-0", "3-1", "6-0", "6-1"]
    assert chosen.drops == {"surplus_group": 2, "equal_rewards_group": 9}
    assert chosen.metrics == {"groups/rounds": 3, "groups/played": 9, "groups/equal_rewards": 5, "groups/surplus": 1}


def test_step_uses_available_groups_after_the_last_round():
    outputs, asked = play([[EQUAL, EQUAL], [DIFFER, EQUAL], [DIFFER, DIFFER]], plan(2, 2))
    assert asked == [0, 1]
    chosen = choose_groups(outputs, plan(2, 2))
    assert [one.group_id for one in chosen.outputs.trajectories] == ["2", "2"]
    nothing, _ = play([[EQUAL]] * 2, plan(1, 2))
    assert choose_groups(nothing, plan(1, 2)).outputs.trajectories == ()


def test_single_round_keeps_every_group():
    outputs, asked = play([[EQUAL, EQUAL]], plan(2, 1))
    assert asked == [0]
    chosen = choose_groups(outputs, plan(2, 1))
    assert chosen.outputs is outputs and not chosen.drops and not chosen.metrics


@given(rounds=st.lists(st.lists(st.sampled_from([EQUAL, DIFFER, [None, None]]), min_size=2, max_size=2), min_size=1))
def test_every_rollout_is_chosen_or_counted(rounds):
    chosen_plan = plan(2, len(rounds) + 1)
    outputs, asked = play([*rounds, [DIFFER, DIFFER]], chosen_plan)
    chosen = choose_groups(outputs, chosen_plan)
    assert len(chosen.outputs.trajectories) + sum(chosen.drops.values()) == len(outputs.trajectories)
    before = [group for number in asked[:-1] for group in rounds[number]]
    assert sum(group is DIFFER for group in before) < 2  # no round too many
    assert len({one.group_id for one in chosen.outputs.trajectories}) == 2  # and none too few
