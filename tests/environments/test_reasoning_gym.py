"""The environment `reasoning_gym`: splits without common questions, the package's own grades, and clear errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from tests.refusals import refused

from .conftest import SUMS


def made(**args: Any) -> Any:
    args = {"task": "chain_sum", "config": SUMS} | args
    settings = EnvironmentSettings(name="reasoning_gym", args=args, train_tasks=300, heldout_tasks=100, seed=1)
    return make_environment(settings)


def play(environment: Any, task: Any, answer: str) -> tuple[str, dict[str, float]]:
    """Return the question and the reward parts of an answer."""

    async def one() -> tuple[str, dict[str, float]]:
        episode = environment.episode(task)
        shown = await episode.reset()
        return shown.content[0], dict((await episode.step(answer)).reward_parts)

    return asyncio.run(one())


def value(question: str) -> int:
    """Return the result of the sum that a question asks for."""
    terms = question.partition("problem: ")[2].partition("=")[0].split()
    signs = [1, *(1 if sign == "+" else -1 for sign in terms[1::2])]
    return sum(sign * int(term) for sign, term in zip(signs, terms[::2], strict=True))


def test_heldout_questions_are_not_asked_in_training():
    environment = made()
    asked = {}
    for split in ("train", "heldout"):
        asked[split] = {play(environment, task, "")[0] for task in environment.tasks(split)}
    assert len(asked["train"]) > 200 and len(asked["heldout"]) > 70
    assert not asked["train"] & asked["heldout"]


def test_answers_are_graded_by_their_values():
    environment = made()
    for task in [*environment.tasks("train")][:20]:
        right = value(play(environment, task, "")[0])
        assert play(environment, task, f" {right}\n")[1] == {"correct": 1.0, "partial": 1.0}
        assert play(environment, task, f"I add. <answer>{right}</answer>")[1]["correct"] == 1.0
        assert play(environment, task, str(right + 1))[1]["correct"] == 0.0
        assert play(environment, task, f"It is {right}.")[1]["correct"] == 0.0


def test_last_number_is_graded():
    environment = made(graded="last number")
    task = next(environment.tasks("heldout"))
    right = value(play(environment, task, "")[0])
    graded = {f"1 + 2 = {right}.": 1.0, f"{right} is not {right + 3}": 0.0, "none": 0.0, f"{right}.5 is it": 0.0}
    for answer, correct in graded.items():
        assert play(environment, task, answer)[1]["correct"] == correct


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"task": "no_such_task"}, "reasoning_gym_task"),
        ({"config": {"min_terms": 3, "max_terms": 2}}, "reasoning_gym_task"),
        ({"config": {"termz": 3}}, "reasoning_gym_task"),
        (
            {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "seed": 1}},
            "reasoning_gym_task",
        ),
    ],
)
def test_wrong_task_is_refused(args, code):
    with refused(code):
        next(made(**args).tasks("train"))
