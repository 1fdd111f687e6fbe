"""Demonstrations that succeed, fail or raise, played in a counting environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.rollouts import GenerateOutputs, TokenIds
from armature.components.models.adapters.sequences import merge_turns
from armature.components.vlm.sft.demonstrate import demonstrate, expert
from tests.builders import make_machine
from tests.refusals import refused


class Counting:
    """An environment in which the answers must be 1, 2, 3. Each right answer earns a third of the reward.

    The demonstration of a task gives the answers in the task's payload.
    """

    name = "counting"
    system_prompt = "Count."
    dialogue = True
    max_turns = 3
    reward_weights: ClassVar[Mapping[str, float]] = {"right": 1 / 3}

    def episode(self, task: Task) -> CountingEpisode:
        return CountingEpisode()

    def demonstration(self, task: Task) -> Sequence[str]:
        if task.payload["answers"] == "raise":
            raise ValueError("no plan")
        return list(task.payload["answers"])

    def close(self) -> None: ...


class CountingEpisode:
    def __init__(self) -> None:
        self._said = 0

    async def reset(self) -> Observation:
        return Observation(("go",))

    async def step(self, action: str) -> Outcome:
        self._said += 1
        right = {"right": float(action == str(self._said))}
        return Outcome(None if self._said == 3 else Observation((f"after {self._said}",)), right)

    async def close(self) -> None: ...


class Letters:
    """A prompt writer whose tokens are the bytes of a text. The token 0 ends an answer."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> TokenIds:
        text = "".join(
            part["text"] + ("\0" if message["role"] == "assistant" else "")
            for message in messages
            for part in self._parts(message)
        )
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def answer(self, text: str) -> TokenIds:
        return np.frombuffer((text + "\0").encode(), np.uint8).astype(np.int32)

    @staticmethod
    def _parts(message: Mapping[str, Any]) -> list[dict[str, str]]:
        content = message["content"]
        return [{"text": content}] if isinstance(content, str) else content


def play(tmp_path, *scripts: object) -> tuple[GenerateOutputs, list[int]]:
    tasks = [Task(f"t{index}", "train", {"answers": answers}) for index, answers in enumerate(scripts)]
    reports: list[int] = []
    machine, images = make_machine(max_concurrent=2), ImageStore(tmp_path)
    outputs = demonstrate(expert(Counting()), tasks, 1.0, Letters(), images, machine, reports.append)  # type: ignore[arg-type]
    return asyncio.run(outputs), reports


def test_failed_demonstrations_are_counted_by_reason(tmp_path):
    outputs, reports = play(tmp_path, "123", "124", "12", "", "raise", ["1", "2", "3", "4"])
    assert [trajectory.task_id for trajectory in outputs.trajectories] == ["t0", "t5"]
    assert {failure.task_id: failure.reason for failure in outputs.failures} == {
        "t1": "goal_not_reached",  # earned two thirds
        "t2": "goal_not_reached",  # has too few answers
        "t3": "no_demonstration",
        "t4": "environment_error",
    }
    assert "ValueError: no plan" in outputs.failures[-1].detail
    assert sorted(reports) == [1, 2, 3, 4, 5, 6]


def test_demonstrations_train_only_on_answers(tmp_path):
    (trajectory,) = play(tmp_path, "123")[0].trajectories
    assert [turn.completion for turn in trajectory.turns] == ["1", "2", "3"]
    assert [bytes(turn.completion_token_ids.astype(np.uint8)) for turn in trajectory.turns] == [b"1\0", b"2\0", b"3\0"]
    last = bytes(trajectory.turns[-1].prompt_token_ids.astype(np.uint8))
    assert last == b"Count.go1\0after 12\0after 2"
    assert all((turn.completion_logprobs == 0).all() for turn in trajectory.turns)
    assert merge_turns(trajectory.turns, True) == [list(trajectory.turns)]  # one sequence holds the whole dialogue


def test_rejects_environment_without_demonstrations():
    class Silent:
        name = "silent"

    with refused("demonstrator_missing", "'silent'", "warm_start"):
        expert(Silent())  # type: ignore[arg-type]
