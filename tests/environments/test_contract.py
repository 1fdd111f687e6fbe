"""What every environment keeps, whatever it asks."""

from __future__ import annotations

import asyncio
import io
import json
import math
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from armature.components.contracts.episodes import Environment, Observation, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from tests.refusals import refused

from .conftest import EXAMPLES, Example

Named = tuple[str, Example]


def settings_of(named: Named, **changes: Any) -> EnvironmentSettings:
    name, example = named
    values = {"name": name, "args": example.args, "train_tasks": 24, "heldout_tasks": 16, "seed": 7, **changes}
    return EnvironmentSettings.model_validate(values)


async def play(environment: Environment, task: Task, answers: Any) -> tuple[list[Observation], float, bool]:
    """The observations, the weighted reward, and whether the episode ended before it ran out of turns."""
    episode = environment.episode(task)
    observations, reward = [await episode.reset()], 0.0
    for turn in range(environment.max_turns):
        outcome = await episode.step(answers(task, turn))
        assert set(outcome.reward_parts) <= set(environment.reward_weights)
        reward += sum(environment.reward_weights[part] * value for part, value in outcome.reward_parts.items())
        if outcome.observation is None:
            break
        observations.append(outcome.observation)
    await episode.close()
    await episode.close()
    return observations, reward, outcome.done


def test_every_registered_environment_is_tested_here_or_by_name() -> None:
    assert set(ENVIRONMENTS) == set(EXAMPLES) | {"verifiers", "openenv", "alfworld/thor"}


def test_the_same_settings_give_the_same_tasks_and_observations(example: Named) -> None:
    async def everything() -> list[Any]:
        environment = make_environment(settings_of(example))
        tasks = list(environment.tasks("heldout"))
        return [(task, await play(environment, task, example[1].wins)) for task in tasks]

    assert asyncio.run(everything()) == asyncio.run(everything())


def test_another_seed_gives_other_observations(example: Named) -> None:
    def first(seed: int) -> list[Observation]:
        environment = make_environment(settings_of(example, seed=seed))
        task = next(iter(environment.tasks("train")))
        return asyncio.run(play(environment, task, example[1].wins))[0]

    assert first(7) != first(8)


def test_splits_have_the_sizes_asked_for_and_share_nothing(example: Named) -> None:
    environment = make_environment(settings_of(example))
    train, heldout = list(environment.tasks("train")), list(environment.tasks("heldout"))
    assert (len(train), len(heldout)) == (24, 16)
    assert {task.split for task in train} == {"train"} and {task.split for task in heldout} == {"heldout"}
    everything = train + heldout
    assert len({task.task_id for task in everything}) == 40
    assert len({json.dumps(task.payload) for task in everything}) == 40

    async def first_content(task: Task) -> tuple[str | bytes, ...]:
        episode = environment.episode(task)
        observation = await episode.reset()
        await episode.close()
        return tuple(part.data if isinstance(part, EncodedImage) else part for part in observation.content)

    assert len({asyncio.run(first_content(task)) for task in everything}) == 40


def test_more_tasks_leave_the_first_ones_as_they_were(example: Named) -> None:
    few, many = (make_environment(settings_of(example, train_tasks=count)) for count in (8, 24))
    assert list(few.tasks("train")) == list(many.tasks("train"))[:8]


def test_a_task_survives_json(example: Named) -> None:
    environment = make_environment(settings_of(example))
    for task in environment.tasks("train"):
        copy = Task(task.task_id, task.split, json.loads(json.dumps(task.payload)))
        results = [asyncio.run(play(environment, either, example[1].wins)) for either in (task, copy)]
        assert results[0] == results[1]


def test_an_oracle_wins_every_task(example: Named) -> None:
    environment = make_environment(settings_of(example))
    for split in ("train", "heldout"):
        for task in environment.tasks(split):
            _, reward, done = asyncio.run(play(environment, task, example[1].wins))
            assert done and math.isclose(reward, example[1].best), task


def test_a_wrong_answer_wins_nothing_but_ends_the_episode(example: Named) -> None:
    environment = make_environment(settings_of(example))
    for task in environment.tasks("train"):
        _, reward, done = asyncio.run(play(environment, task, lambda *_: example[1].loses))
        assert done and reward == 0, task


@pytest.mark.parametrize("hostile", ["", "\0", "9" * 5000, "nan,nan", "<|im_end|>", "\ud800", "{}" * 1000, "٣"])
def test_hostile_answers_are_answers(example: Named, hostile: str) -> None:
    environment = make_environment(settings_of(example))
    _, reward, done = asyncio.run(play(environment, next(iter(environment.tasks("train"))), lambda *_: hostile))
    assert done and 0 <= reward < example[1].best


def test_observations_hold_text_and_readable_images(example: Named) -> None:
    environment = make_environment(settings_of(example))
    observations, _, _ = asyncio.run(play(environment, next(iter(environment.tasks("train"))), example[1].wins))
    parts = [part for observation in observations for part in observation.content]
    assert any(isinstance(part, EncodedImage) for part in parts)
    for part in parts:
        assert isinstance(part, str | EncodedImage)
        if isinstance(part, EncodedImage):
            with Image.open(io.BytesIO(part.data)) as opened:
                opened.load()
                assert part.media_type == Image.MIME[str(opened.format)]


def test_two_episodes_of_a_task_do_not_disturb_each_other(example: Named) -> None:
    environment = make_environment(settings_of(example))
    task = next(iter(environment.tasks("train")))

    async def both() -> list[tuple[list[Observation], float, bool]]:
        return await asyncio.gather(*(play(environment, task, example[1].wins) for _ in range(2)))

    one, other = asyncio.run(both())
    assert one == other and one[1] == example[1].best


def test_args_that_are_left_out_are_recorded_with_their_defaults_or_refused_by_name(example: Named) -> None:
    name, known = example
    for key in known.args:
        less = {other: value for other, value in known.args.items() if other != key}
        try:
            settings = settings_of((name, Example(less, known.wins, known.loses, known.best)))
        except ValidationError as refusal:
            assert key in str(refusal)
        else:
            assert key in settings.args
            make_environment(settings)


def test_unknown_and_impossible_args_are_refused(example: Named) -> None:
    name, known = example
    with refused("extra_forbidden", "colorz"):
        settings_of((name, Example({**known.args, "colorz": 1}, known.wins, known.loses, known.best)))
    with refused("greater_than_equal" if "image_size" in known.args else "extra_forbidden", "image_size"):
        settings_of((name, Example({**known.args, "image_size": 0}, known.wins, known.loses, known.best)))
