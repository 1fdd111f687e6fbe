"""The environment `reasoning_gym`: questions with answers that the package reasoning-gym generates and grades."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

from pydantic import Field

from armature.components.artifacts.sources import versions
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.errors import ConfigurationError, said
from armature.components.contracts.settings import Settings
from armature.components.environments.generated import GeneratedEnvironment

TRIES = 1000
"""Questions that are generated for a task, at most, until one belongs to the task's split."""


class ReasoningGymSettings(Settings):
    """Settings of the environment `reasoning_gym`."""

    task: str
    """Name of the task, for example chain_sum."""
    config: dict[str, Any] = Field({})
    """Settings of the task, for example {min_terms = 2, max_terms = 3}."""
    instruction: str = "Answer with the final answer only."
    """Text below the question."""
    graded: Literal["answer", "last number"] = "answer"
    """Grade the whole answer, or only the last number in it. If a text has <answer> and </answer>, the answer is what
    stands between them."""
    correct_weight: float = 1.0
    """Reward for a correct answer."""
    partial_weight: float = 0.0
    """Reward for the package's own score, from 0 to 1, which gives part of it to some wrong answers."""


class ReasoningGym(GeneratedEnvironment[ReasoningGymSettings]):
    """An environment of one question and one answer.

    No held-out question is asked in training: the digest of a question decides to which split it belongs, one in four
    is held out. A task with few different questions repeats them.
    """

    name = "reasoning_gym"
    Settings = ReasoningGymSettings
    draws_only = True
    max_turns = 1

    def __init__(self, settings: ReasoningGymSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.reward_weights = {"correct": settings.correct_weight, "partial": settings.partial_weight}
        self._questions = lru_cache(maxsize=32)(self._generate)

    @staticmethod
    def sources(settings: ReasoningGymSettings) -> dict[str, str]:
        """Return the package's version."""
        return versions("reasoning-gym")

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        """Return the seed of a dataset, and the number of the first question in it that belongs to the split.

        Raises:
            ConfigurationError: there is no such task, its settings are wrong, or `TRIES` questions are all in the other
                split.
        """
        questions, heldout = self._questions(seed * TRIES), bool(seed % 2)
        for number in range(TRIES):
            digest = sha256(questions[number]["question"].encode()).digest()
            if (digest[0] % 4 == 0) == heldout:
                return {"seed": seed * TRIES, "number": number}
        raise ConfigurationError(
            f"the task {self.settings.task!r} has too few different questions",
            code="too_few_questions",
            where="environment.args.config",
            remedy="let it generate more kinds of questions",
        )

    def demonstration(self, task: Task) -> list[str]:
        return [str(self._questions(task.payload["seed"])[task.payload["number"]]["answer"])]

    def episode(self, task: Task) -> Question:
        return Question(self._questions(task.payload["seed"]), task.payload["number"], self.settings)

    def _generate(self, seed: int) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self.settings.task, seed=seed, size=TRIES, **self.settings.config)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigurationError(
                f"reasoning-gym cannot make the task {self.settings.task!r}: {said(error)}",
                code="reasoning_gym_task",
                where="environment.args",
                remedy="correct its name or its settings; reasoning_gym.factory.DATASETS has all names",
            ) from error


class Question:
    """An episode of one turn: it asks question `number` of a dataset and grades the answer."""

    def __init__(self, questions: Any, number: int, settings: ReasoningGymSettings) -> None:
        self._questions, self._entry, self._settings = questions, questions[number], settings

    async def reset(self) -> Observation:
        return Observation((f"{self._entry['question']}\n{self._settings.instruction}",))

    async def step(self, action: str) -> Outcome:
        answer = (re.findall(r"<answer>(.*?)</answer>", action, re.DOTALL) or [action])[-1].strip()
        if self._settings.graded == "last number":
            answer = (re.findall(r"-?\d+(?:\.\d+)?", answer) or [""])[-1]
        score = float(self._questions.score_answer(answer, self._entry))
        return Outcome(None, {"correct": float(score >= 1), "partial": score})

    async def close(self) -> None:
        pass
