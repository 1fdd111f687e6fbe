"""Demonstrations: a demonstrator's answers, played in the real environment like those of any policy."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import DemonstrationEnvironment, Environment, Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.failures import RolloutFailed
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from armature.components.inference.client import Completion, GenerationFailure, Message, Sampling
from armature.components.inference.settings import EvaluationSamplingSettings
from armature.components.rollouts.conversation import SharedImages
from armature.components.rollouts.open_files import allow_episodes
from armature.components.rollouts.play import EpisodeRunner, RolloutId
from armature.components.sft.prompts import PromptWriter

_NOTHING_IS_SAMPLED = EvaluationSamplingSettings(temperature=0.0, max_tokens=1)


class Demonstrator:
    """A policy that says prepared answers, one a turn, each token with probability 1."""

    def __init__(self, answers: Sequence[str], writer: PromptWriter) -> None:
        self._answers, self._writer = deque(answers), writer

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        """
        Raises:
            GenerationFailure: all answers are said, and the episode continues.
        """
        if not self._answers:
            raise GenerationFailure("the answers end before the episode does", reason="goal_not_reached")
        text = self._answers.popleft()
        prompt = await asyncio.to_thread(self._writer.prompt, messages)
        tokens = self._writer.answer(text)
        certain = np.zeros(len(tokens), dtype=np.float32)
        return Completion(prompt, tokens, certain, text, "stop", 0, "expert", 0.0)


def expert(environment: Environment) -> DemonstrationEnvironment:
    """`environment` itself, if it knows how its tasks are solved.

    Raises:
        ConfigurationError: it does not.
    """
    if not hasattr(environment, "demonstration"):
        raise ConfigurationError(
            f"environment {environment.name!r} gives no demonstrations, so there is nothing to start from",
            code="demonstrator_missing",
            where="warm_start",
            remedy="take the section out of the recipe, or give the environment a method demonstration(task)",
        )
    return environment  # type: ignore[return-value]


async def demonstrate(
    environment: DemonstrationEnvironment,
    tasks: Sequence[Task],
    success_reward: float,
    writer: PromptWriter,
    images: ImageStore,
    machine: Machine,
    report: Callable[[int], None],
) -> GenerateOutputs:
    """One demonstration of each task, in their order; what does not reach its goal is a failure.

    `report` is told how many are finished.
    """
    allow_episodes(machine.max_concurrent)
    shared = SharedImages(images)
    limit = asyncio.Semaphore(machine.max_concurrent)
    finished = 0

    async def play(task: Task, place: RolloutId) -> Trajectory | Failure:
        nonlocal finished
        async with limit:
            try:
                result = await _played(task, place)
            except RolloutFailed as failed:
                result = Failure(place.trajectory_id, place.group_id, task.task_id, failed.reason, failed.detail)
        finished += 1
        report(finished)
        return result

    async def _played(task: Task, place: RolloutId) -> Trajectory | Failure:
        try:
            answers = await asyncio.to_thread(environment.demonstration, task)
        except Exception as error:  # an environment is code that we did not write
            raise RolloutFailed("environment_error", f"demonstration: {type(error).__name__}: {error}") from error
        if not answers:
            raise RolloutFailed("no_demonstration", "the demonstrator knows no answers")
        policy = Demonstrator(answers, writer)
        player = EpisodeRunner(environment, policy, shared, _NOTHING_IS_SAMPLED, 0, machine.environment_timeout)
        trajectory = await player.play(task, place)
        if trajectory.truncated or not trajectory.earns(success_reward):
            ending = "ran out of turns" if trajectory.truncated else "ended"
            raise RolloutFailed(
                "goal_not_reached", f"{ending} after {len(trajectory.turns)} turns with {trajectory.reward:g}"
            )
        return trajectory

    results = await asyncio.gather(*(play(task, RolloutId(0, index, 0)) for index, task in enumerate(tasks)))
    return GenerateOutputs(
        tuple(result for result in results if isinstance(result, Trajectory)),
        tuple(result for result in results if isinstance(result, Failure)),
    )
