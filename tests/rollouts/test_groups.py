"""What makes a group's members comparable: one task, one start, and no request for an episode that is done."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Observation, Outcome, Split, Task
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.rollouts.collect import collect
from armature.components.rollouts.schedule import tasks_of_step

from .conftest import SAMPLING, RecordedEvents, ScriptedPolicy

TASKS = [Task(f"t{number}", "train", {"seed": number}) for number in range(12)]
STEP, GROUPS, MEMBERS = 3, 4, 5


class Rooms:
    """The start is drawn from the payload's seed, the length from what is answered."""

    name, system_prompt, dialogue, max_turns = "rooms", None, False, 4
    reward_weights: Mapping[str, float] = {"won": 1.0}

    def __init__(self) -> None:
        self.starts: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def tasks(self, split: Split) -> Sequence[Task]:
        return TASKS

    def episode(self, task: Task) -> Room:
        self.starts[task.task_id].append(dict(task.payload))
        return Room(random.Random(task.payload["seed"]).randrange(10**9))

    def close(self) -> None: ...


class Room:
    def __init__(self, start: int) -> None:
        self.start, self.done = start, False

    async def reset(self) -> Observation:
        return Observation((f"room {self.start}",), anchor_key=f"room {self.start}")

    async def step(self, action: str) -> Outcome:
        assert not self.done
        self.done = action == "leave"
        return Outcome(None if self.done else Observation(("a corridor",), anchor_key="a corridor"))

    async def close(self) -> None: ...


def leave_or_stay(messages: Sequence[Mapping[str, Any]], seed: int) -> str:
    return "leave" if seed % 3 == 0 else "stay"


def play(store: ImageStore, policy: ScriptedPolicy, environment: Rooms) -> GenerateOutputs:
    tasks = tasks_of_step(TASKS, GROUPS, STEP, seed=5)
    machine, events = Machine.model_validate({}), RecordedEvents()
    return asyncio.run(
        collect(environment, tasks, MEMBERS, policy, store, SAMPLING, step=STEP, seed=5, machine=machine, events=events)
    )


def test_the_members_of_a_group_play_one_task_from_one_start(store):
    environment = Rooms()
    outputs = play(store, ScriptedPolicy(leave_or_stay, shuffle=True), environment)
    planned = [task.task_id for task in tasks_of_step(TASKS, GROUPS, STEP, seed=5)]
    assert len(set(planned)) == GROUPS and sorted(environment.starts) == sorted(planned)
    for group, task_id in enumerate(planned):
        members = outputs.trajectories[group * MEMBERS : (group + 1) * MEMBERS]
        assert {(one.group_id, one.task_id) for one in members} == {(f"{STEP:06d}-{group:04d}", task_id)}
        assert environment.starts[task_id] == [{"seed": int(task_id[1:])}] * MEMBERS
        (start,) = {one.turns[0].messages for one in members}
        assert json.loads(start)[0]["content"][0]["text"] == next(iter({one.turns[0].anchor_key for one in members}))


def test_only_episodes_that_go_on_ask_for_tokens(store):
    policy = ScriptedPolicy(leave_or_stay, shuffle=True)
    outputs = play(store, policy, Rooms())
    lengths = [len(one.turns) for one in outputs.trajectories]
    assert set(lengths) == {1, 2, 3, Rooms.max_turns} and any(one.truncated for one in outputs.trajectories)
    assert len(policy.requests) == sum(lengths) < len(lengths) * max(lengths)
    for one in outputs.trajectories:
        answers = [turn.completion for turn in one.turns]
        assert answers.count("leave") == (0 if one.truncated else 1)
