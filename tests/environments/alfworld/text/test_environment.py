"""Episodes of alfworld/text: observations, action defects and rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any

import pytest

from armature.components.artifacts.images import decode
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.text.environment import AlfworldText, KnownState, draw, kinds
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from tests.refusals import refused

from ..games_of import PROMPT, TEXT


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[..., AlfworldText]]:
    """A function that makes an environment with changed arguments; all are closed at the end."""
    with ExitStack() as opened:

        def make(**changes: Any) -> AlfworldText:
            args = {**TEXT, **changes}
            values = {"name": "alfworld/text", "args": args, "train_tasks": 6, "heldout_tasks": 3, "seed": 2}
            environment = make_environment(EnvironmentSettings.model_validate(values), processes=1)
            assert isinstance(environment, AlfworldText)
            return opened.enter_context(closing(environment))

        yield make


@pytest.fixture(scope="module")
def environment(made: Callable[..., AlfworldText]) -> AlfworldText:
    return made()


def first_task(environment: AlfworldText) -> Task:
    return next(iter(environment.tasks("train")))


async def answered(environment: AlfworldText, task: Task, answers: list[str]) -> tuple[Observation, list[Outcome]]:
    episode = environment.episode(task)
    first = await episode.reset()
    outcomes = [await episode.step(answer) for answer in answers]
    await episode.close()
    return first, outcomes


def shown(observation: Observation | None) -> str:
    assert observation is not None
    return "".join(part for part in observation.content if isinstance(part, str))


def test_demonstrations_win_every_kind_of_task(environment: AlfworldText) -> None:
    tasks = [*environment.tasks("train"), *environment.tasks("heldout")]
    assert len({task.payload["kind"] for task in tasks}) == 6
    for task in tasks:
        _, outcomes = asyncio.run(answered(environment, task, list(environment.demonstration(task))))
        assert [outcome.action_defect for outcome in outcomes] == [None] * len(outcomes)
        assert outcomes[-1].done and not any(outcome.done for outcome in outcomes[:-1])
        assert [dict(outcome.reward_parts) for outcome in outcomes] == [{}] * (len(outcomes) - 1) + [{"won": 1.0}]
    assert environment.reward_weights == {"won": 10.0} and not environment.dialogue


def test_detours_are_always_admissible(made: Callable[..., AlfworldText]) -> None:
    """In rooms of the usual size, some places are reached from the same spot, and no command goes there again."""
    games = {**TEXT["games"], "most_receptacles": 40, "rooms": ["Bathroom"], "kinds": ["pick_and_place_simple"]}
    environment = made(games=games, detours=4, max_turns=30)
    added = []
    for task in environment.tasks("train"):
        for name in "abcd":
            same = Task(name, "train", task.payload)
            answers = list(environment.demonstration(same))
            _, outcomes = asyncio.run(answered(environment, same, answers))
            assert [outcome.action_defect for outcome in outcomes] == [None] * len(answers)
            assert outcomes[-1].reward_parts == {"won": 1.0}
            added.append(len(answers) - len(task.payload["plan"]))
    assert max(added) >= 4 and min(added) == 0


def test_heldout_tasks_come_from_heldout_source(environment: AlfworldText, made: Callable[..., AlfworldText]) -> None:
    assert {task.payload["source"] for task in environment.tasks("train")} == {"train"}
    assert {task.payload["source"] for task in environment.tasks("heldout")} == {"valid_unseen"}
    assert {task.payload["source"] for task in made(heldout_source="valid_seen").tasks("heldout")} == {"valid_seen"}


def test_action_defects_distinguish_format_and_inadmissible(environment: AlfworldText) -> None:
    task = first_task(environment)
    move = task.payload["plan"][0]
    answers = ["I think so", "<action>go to the moon</action>", f"<action>{move}</action>", f"well, {move}"]
    first, outcomes = asyncio.run(answered(environment, task, answers))
    assert [outcome.action_defect for outcome in outcomes] == ["format", "inadmissible", None, "format"]
    assert first.admissible_actions is not None and move in first.admissible_actions
    for outcome in outcomes[:2]:
        assert outcome.observation is not None and outcome.observation.anchor_key == "Nothing happens."
    assert shown(outcomes[2].observation).split("Now: ")[1].startswith("You arrive at")


def test_anchor_key_depends_only_on_the_game_text(environment: AlfworldText) -> None:
    task = first_task(environment)
    plan = list(environment.demonstration(task))

    async def group() -> list[tuple[Observation, list[Outcome]]]:
        return await asyncio.gather(
            answered(environment, task, plan[:1]),
            answered(environment, task, ["nonsense", *plan[:1]]),
        )

    (one, straight), (other, detour) = asyncio.run(group())
    assert one == other
    assert one.anchor_key is not None and one.anchor_key.startswith("-= Welcome")
    there, later = straight[-1].observation, detour[-1].observation
    assert there is not None and later is not None
    assert there.anchor_key == later.anchor_key and shown(there) != shown(later)


def test_episode_ends_without_reward_after_max_turns(made: Callable[..., AlfworldText]) -> None:
    environment = made(max_turns=3)
    task = first_task(environment)
    _, outcomes = asyncio.run(answered(environment, task, ["<action>look</action>"] * 3))
    assert [outcome.done for outcome in outcomes] == [False, False, True]
    assert outcomes[-1].reward_parts == {"won": 0.0}


def test_max_invalid_actions_ends_the_episode(made: Callable[..., AlfworldText]) -> None:
    environment = made(max_invalid_actions=3)
    task = first_task(environment)
    *plan, last = environment.demonstration(task)
    wrong = ["nonsense", "<action>go to the moon</action>"]
    _, won = asyncio.run(answered(environment, task, [*wrong, *plan, last]))
    assert won[-1].reward_parts == {"won": 1.0} and not any(outcome.done for outcome in won[:-1])
    _, lost = asyncio.run(answered(environment, task, [*wrong, *plan, "nonsense"]))
    assert lost[-1].done and lost[-1].action_defect == "format" and lost[-1].reward_parts == {"won": 0.0}
    assert not any(outcome.done for outcome in lost[:-1])


def test_action_list_is_shown_only_by_the_template(made: Callable[..., AlfworldText]) -> None:
    environment = made(prompt={**PROMPT, "first": "{observation}"}, image={"form": "none"})
    first, _ = asyncio.run(answered(environment, first_task(environment), []))
    assert first.content == (first.anchor_key,) and first.admissible_actions


def test_known_state_follows_the_text() -> None:
    seen = KnownState.begin("put a clean mug in cabinet")
    assert seen.cells()[:2] == ("mug", "cabinet") and set(seen.cells()[2:]) == {None}
    seen.read("You arrive at sinkbasin 1. On the sinkbasin 1, you see a mug 2, a fork 1, and a mug 1.")
    assert seen.cells()[4:6] == ("sinkbasin", None) and seen.cells()[8:12] == ("mug", "fork", "mug", None)
    seen.read("You pick up the mug 2 from the sinkbasin 1.")
    assert seen.cells()[4:6] == ("sinkbasin", "mug") and seen.cells()[8:11] == ("fork", "mug", None)
    seen.read("Nothing happens.")
    seen.read("You arrive at cabinet 3. The cabinet 3 is closed.")
    assert seen.cells()[4:6] == ("cabinet", "mug") and set(seen.cells()[8:]) == {None}
    seen.read("You open the cabinet 3. The cabinet 3 is open. In it, you see nothing.")
    seen.read("You move the mug 2 to the cabinet 3.")
    assert seen.cells()[4:6] == ("cabinet", None) and seen.cells()[8:10] == ("mug", None)


def test_every_kind_has_a_unique_cell() -> None:
    images = {decode(draw((kind, *[None] * 15), 56)).crop((0, 0, 14, 14)).tobytes() for kind in kinds()}
    assert len(images) == len(kinds())
    assert decode(draw((None,) * 16, 56)).size == (56, 56)


def test_image_is_first_and_cached(environment: AlfworldText) -> None:
    task = first_task(environment)
    images = [asyncio.run(answered(environment, task, []))[0].content[0] for _ in range(2)]
    assert isinstance(images[0], EncodedImage) and images[0] is images[1]


def test_rejects_invalid_payload_before_the_engine(environment: AlfworldText) -> None:
    task = first_task(environment)
    for key, value in (("goal", "{open('x', 'w')}"), ("problem", "(define")):
        with refused(f"invalid_{key}", task.task_id):
            environment.episode(Task(task.task_id, task.split, {**task.payload, key: value}))


def test_missing_alfworld_names_install_command(
    made: Callable[..., AlfworldText], monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged.folder.cache_clear()
    monkeypatch.setattr(packaged, "find_spec", lambda name: None if name == "textworld" else find_spec(name))
    with refused("package_missing", "textworld", "armature-vla[alfworld]"):
        made()
    packaged.folder.cache_clear()
