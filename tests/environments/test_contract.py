"""The contract of every registered environment, and the tasks stage."""

from __future__ import annotations

import asyncio
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from PIL import Image
from pydantic import ValidationError

from armature.components.configuration.stages import run_stage
from armature.components.contracts.episodes import Environment, Observation, Split, Task
from armature.components.contracts.images import VIDEO, EncodedImage
from armature.components.contracts.stages import Artifact
from armature.components.environments import ENVIRONMENTS
from armature.components.environments.colors import Colors
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_environment, load_tasks
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import EXAMPLES, Example

Named = tuple[str, Example]


def settings_of(named: Named, **changes: Any) -> EnvironmentSettings:
    name, example = named
    values = {"name": name, "args": example.args, "train_tasks": 24, "heldout_tasks": 16, "seed": 7, **changes}
    return EnvironmentSettings.model_validate(values)


@pytest.fixture
def environment(example: Named) -> Environment:
    return make_environment(settings_of(example))


async def play(environment: Environment, task: Task, answers: Any) -> tuple[list[Observation], float, bool]:
    """Play a task and return its observations, its weighted reward, and True if the episode ended."""
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


def test_every_registered_environment_has_tests() -> None:
    assert set(ENVIRONMENTS) == set(EXAMPLES) | {"program", "verifiers", "openenv", "alfworld/thor"}


def test_equal_settings_give_equal_tasks_and_observations(example: Named) -> None:
    async def everything() -> list[Any]:
        environment = make_environment(settings_of(example))
        tasks = list(environment.tasks("heldout"))
        return [(task, await play(environment, task, example[1].wins)) for task in tasks]

    assert asyncio.run(everything()) == asyncio.run(everything())


def test_different_seeds_give_different_observations(example: Named) -> None:
    def first(seed: int) -> list[Observation]:
        environment = make_environment(settings_of(example, seed=seed))
        task = next(iter(environment.tasks("train")))
        return asyncio.run(play(environment, task, example[1].wins))[0]

    assert first(7) != first(8)


def test_splits_have_requested_sizes_and_share_no_task(environment: Environment) -> None:
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


def test_larger_task_count_keeps_the_first_tasks(example: Named) -> None:
    few, many = (make_environment(settings_of(example, train_tasks=count)) for count in (8, 24))
    assert list(few.tasks("train")) == list(many.tasks("train"))[:8]


def test_task_round_trips_through_json(environment: Environment, example: Named) -> None:
    for task in environment.tasks("train"):
        copy = Task(task.task_id, task.split, json.loads(json.dumps(task.payload)))
        results = [asyncio.run(play(environment, either, example[1].wins)) for either in (task, copy)]
        assert results[0] == results[1]


def test_correct_answers_win_every_task(environment: Environment, example: Named) -> None:
    for split in ("train", "heldout"):
        for task in environment.tasks(split):
            _, reward, done = asyncio.run(play(environment, task, example[1].wins))
            assert done and math.isclose(reward, example[1].best), task


def test_wrong_answers_end_the_episode_without_reward(environment: Environment, example: Named) -> None:
    for task in environment.tasks("train"):
        _, reward, done = asyncio.run(play(environment, task, lambda *_: example[1].loses))
        assert done and reward == 0, task


@pytest.mark.parametrize("hostile", ["", "\0", "9" * 5000, "nan,nan", "<|im_end|>", "\ud800", "{}" * 1000, "٣"])
def test_hostile_answers_end_the_episode_without_full_reward(
    environment: Environment, example: Named, hostile: str
) -> None:
    _, reward, done = asyncio.run(play(environment, next(iter(environment.tasks("train"))), lambda *_: hostile))
    assert done and 0 <= reward < example[1].best


def test_observations_hold_text_and_readable_images(environment: Environment, example: Named) -> None:
    observations, _, _ = asyncio.run(play(environment, next(iter(environment.tasks("train"))), example[1].wins))
    parts = [part for observation in observations for part in observation.content]
    assert any(isinstance(part, EncodedImage) for part in parts) == example[1].images
    for part in parts:
        assert isinstance(part, str | EncodedImage)
        if isinstance(part, EncodedImage):
            with Image.open(io.BytesIO(part.data)) as opened:
                opened.load()
                assert part.media_type in (Image.MIME[str(opened.format)], VIDEO)


def test_concurrent_episodes_of_a_task_are_independent(environment: Environment, example: Named) -> None:
    task = next(iter(environment.tasks("train")))

    async def both() -> list[tuple[list[Observation], float, bool]]:
        return await asyncio.gather(*(play(environment, task, example[1].wins) for _ in range(2)))

    one, other = asyncio.run(both())
    assert one == other and one[1] == example[1].best


def test_missing_args_get_defaults_or_are_refused(example: Named) -> None:
    complete = settings_of(example).args
    for key in complete:
        less = {other: value for other, value in complete.items() if other != key}
        try:
            settings = settings_of(example, args=less)
        except ValidationError as refusal:
            assert key in str(refusal)
        else:
            assert key in settings.args
            make_environment(settings)


def test_rejects_unknown_and_invalid_args(example: Named) -> None:
    args = example[1].args
    image_code = "greater_than_equal" if "image_size" in args else "extra_forbidden"
    for key, value, code in (("colorz", 1, "extra_forbidden"), ("image_size", 0, image_code)):
        with refused(code, key):
            settings_of(example, args={**args, key: value})


@pytest.fixture
def chosen(example: Named) -> EnvironmentSettings:
    return settings_of(example, train_tasks=20, heldout_tasks=6, seed=3)


def run_tasks(settings: EnvironmentSettings, store: Path) -> Artifact:
    return run_stage("tasks", settings, {}, make_machine(store=store))


def test_tasks_artifact_round_trips(chosen: EnvironmentSettings, tmp_path: Path) -> None:
    folder = run_tasks(chosen, tmp_path).path
    environment = make_environment(chosen)
    assert load_tasks(folder, "train") == list(environment.tasks("train"))
    assert load_tasks(folder, "heldout") == list(environment.tasks("heldout"))
    assert list(load_environment(folder).tasks("train")) == load_tasks(folder, "train")
    frame = pd.read_parquet(folder / "train.parquet")
    assert frame.columns.tolist() == ["task_id", "split", "payload"] and len(frame) == 20
    with Image.open(folder / "preview.png") as preview:
        assert len(preview.convert("RGB").getcolors(10**6) or []) > 1 + EXAMPLES[chosen.name].images


def test_tasks_artifact_digest_is_reproducible(chosen: EnvironmentSettings, tmp_path: Path) -> None:
    assert run_tasks(chosen, tmp_path / "one").digest == run_tasks(chosen, tmp_path / "other").digest


def test_rejects_folder_that_is_not_a_tasks_artifact(tmp_path: Path) -> None:
    with refused("table_unreadable", tmp_path):
        load_tasks(tmp_path, "train")
    with refused("not_a_tasks_artifact", tmp_path):
        load_environment(tmp_path)


def test_unknown_environment_name_suggests_similar_name() -> None:
    with refused("unknown_name", "'colors'"):
        EnvironmentSettings(name="colrs", args={}, train_tasks=1, heldout_tasks=1, seed=0)


def test_settings_import_without_torch_and_verifiers() -> None:
    imports = "import armature.components.environments.settings, sys"
    code = f"{imports}; sys.exit(bool({{'torch', 'verifiers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Odd(Colors):
    """An environment whose `tasks` returns the result of `listed`."""

    listed: ClassVar[Callable[[Split], Any]]

    def tasks(self, split: Split) -> Iterator[Task]:
        tasks: Iterator[Task] = type(self).listed(split)
        return tasks


def exits(split: Split) -> Any:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("listed", "code", "value"),
    [
        pytest.param(lambda split: [], "no_tasks", "'train'", id="none"),
        pytest.param(lambda split: (Task(f"t{n}", split, {}) for n in count()), "too_many_tasks", 2, id="endless"),
        pytest.param(lambda split: [Task("t", split, {})] * 2, "task_repeated", "'t'", id="one name twice"),
        pytest.param(lambda split: ["t"], "tasks_not_listed", "str", id="no task"),
        pytest.param(lambda split: None, "tasks_not_listed", "TypeError", id="nothing"),
        pytest.param(lambda split: [Task("t", "test", {})], "tasks_not_listed", "'test'", id="another split"),  # type: ignore[arg-type]
        pytest.param(lambda split: [Task("\ud800", split, {})], "tasks_not_listed", "task_id", id="surrogate"),
        pytest.param(lambda split: [Task("t", split, {"x": float("nan")})], "tasks_not_listed", "ValueError", id="nan"),
        pytest.param(lambda split: [Task("t", split, {"x": object()})], "tasks_not_listed", "TypeError", id="not JSON"),
        pytest.param(exits, "tasks_not_listed", "SystemExit", id="exit"),
        pytest.param(lambda split: [Task("t", split, {})], "episode_not_started", "KeyError", id="cannot be begun"),
    ],
)
def test_rejects_invalid_task_lists(
    listed: Callable[[Split], Any], code: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "listed", staticmethod(listed), raising=False)
    monkeypatch.setitem(ENVIRONMENTS._entries, "odd", f"{__name__}:Odd")
    settings = settings_of(("odd", EXAMPLES["colors"]), train_tasks=2, heldout_tasks=2)
    with refused(code, value):
        run_tasks(settings, tmp_path)


def test_rejects_unknown_evaluation_args(chosen: EnvironmentSettings) -> None:
    with refused("extra_forbidden", "no_such_argument"):
        EnvironmentSettings.model_validate(chosen.model_dump() | {"evaluation_args": {"no_such_argument": 1}})
