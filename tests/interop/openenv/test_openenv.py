"""The environment `openenv` against a server that is written with openenv, in an environment of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from armature.components.artifacts.images import decode
from armature.components.contracts.episodes import Environment, Observation, Outcome, Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.images import EncodedImage
from armature.components.environments.guarded import GuardedEpisode
from armature.components.environments.make import make_environment
from armature.components.environments.openenv.environment import OpenEnvEnvironment
from armature.components.environments.settings import EnvironmentSettings
from tests.refusals import refused

PYTHON = Path(__file__).parents[3] / ".venv-programs/bin/python"
SERVER = Path(__file__).with_name("server.py")
COLORS = {(255, 0, 0): "red", (0, 255, 0): "green", (0, 0, 255): "blue"}

Policy = Callable[[Observation], str]


def settings(*options: str, **args: Any) -> EnvironmentSettings:
    shown = {"prompt": "{image}{message}", "images": ["screen"], "action": {"color": "{completion}"}, "max_turns": 4}
    if not args.keys() & {"base_url", "command"}:
        args["command"] = [str(PYTHON), str(SERVER), "--port", "{port}", *options]
    return EnvironmentSettings(name="openenv", args=shown | args, train_tasks=6, heldout_tasks=3, seed=1)


@contextmanager
def served(*options: str, **args: Any) -> Iterator[Environment]:
    with closing(make_environment(settings(*options, **args))) as environment:
        yield environment


@pytest.fixture(scope="module")
def started() -> Iterator[Environment]:
    """An environment whose server runs and allows two sessions. All tests share it, because it takes long to start."""
    with served("--sessions", "2", start_timeout=120) as environment:
        environment.episode(first(environment))
        yield environment


@pytest.fixture
def server(started) -> str:
    """The address of the server of `started`."""
    return started._server.url()  # type: ignore[attr-defined, no-any-return]


def color_of(observation: Observation) -> str:
    (image,) = [part for part in observation.content if isinstance(part, EncodedImage)]
    pixel = decode(image).convert("RGB").getpixel((8, 8))
    return COLORS[pixel]  # type: ignore[index]


async def play(environment: Environment, task: Task, policy: Policy, timeout: float = 30.0) -> list[Outcome]:
    episode = GuardedEpisode(environment, task, timeout)
    try:
        observation: Observation | None = await episode.reset()
        outcomes = []
        while observation is not None:
            outcomes.append(await episode.step(policy(observation)))
            observation = outcomes[-1].observation
        return outcomes
    finally:
        await episode.close()


def first(environment: Environment) -> Task:
    return next(iter(environment.tasks("train")))


@pytest.mark.parametrize("pixels", [False, True])
def test_episodes_are_played_and_rewarded_by_the_server(server, pixels):
    with served(base_url=server, reset={"pixels": pixels}) as environment:
        tasks = [task for split in ("train", "heldout") for task in environment.tasks(split)]  # type: ignore[arg-type]
        assert len({task.payload["seed"] for task in tasks}) == 9
        for task in tasks:
            (outcome,) = asyncio.run(play(environment, task, color_of))
            assert outcome.done and outcome.reward_parts == {"reward": 1.0} and outcome.action_defect is None


def test_server_reply_becomes_the_next_observation(server):
    with served(base_url=server, prompt="{images}{message} {metadata.colors}") as environment:

        async def twice_wrong() -> None:
            task = first(environment)
            episode = GuardedEpisode(environment, task, 30.0)
            shown = await episode.reset()
            expected = f"Game {task.payload['seed']} A. red\nB. green\nC. blue"
            assert "".join(part for part in shown.content if isinstance(part, str)) == expected
            await episode.close()

        asyncio.run(twice_wrong())
    with served(base_url=server) as environment:
        wrong = {"red": "green", "green": "blue", "blue": "red"}
        first_seen: list[str] = []

        def miss(observation: Observation) -> str:
            if not first_seen:
                first_seen.append(wrong[color_of(observation)])
            else:
                assert observation.content == ("Wrong, again.",)
            return first_seen[0]

        outcomes = asyncio.run(play(environment, first(environment), miss))
        assert [outcome.reward_parts for outcome in outcomes] == [{"reward": 0.0}] * 2


def test_episodes_wait_for_a_free_session(server):
    with served(base_url=server) as environment:

        async def all_at_once() -> list[list[Outcome]]:
            return await asyncio.gather(*(play(environment, task, color_of) for task in environment.tasks("train")))

        assert [outcomes[-1].reward_parts["reward"] for outcomes in asyncio.run(all_at_once())] == [1.0] * 6


@pytest.mark.parametrize("answer", ["", "mauve", "a\x00b"])
def test_answer_of_a_wrong_type_gets_the_invalid_reward(server, answer):
    with served(base_url=server, invalid_reward=-0.5) as environment:
        (outcome,) = asyncio.run(play(environment, first(environment), lambda _: answer))
        assert outcome.done and outcome.reward_parts == {"reward": -0.5} and outcome.action_defect == "format"


def test_action_is_parsed_from_json(server):
    with served(base_url=server, action="json", extract="</think>") as environment:
        task = first(environment)
        output = 'Perhaps {"color": "red"}?</think>I say {"color": "%s"}.'
        (outcome,) = asyncio.run(play(environment, task, lambda shown: output % color_of(shown)))
        assert outcome.reward_parts == {"reward": 1.0}
        for nothing in ("red", '{"color": "red"}', '</think>{"colour": "red"}', "</think>{"):
            (outcome,) = asyncio.run(play(environment, task, lambda _, nothing=nothing: nothing))  # type: ignore[misc]
            assert outcome.action_defect == "format"


def test_observation_without_prompt_is_shown_as_json(server):
    with served(base_url=server, prompt="") as environment:

        async def see() -> Observation:
            episode = GuardedEpisode(environment, first(environment), 30.0)
            shown = await episode.reset()
            await episode.close()
            return shown

        image, text = asyncio.run(see()).content
        assert isinstance(image, EncodedImage)
        assert text == f'{{"message": "Game {first(environment).payload["seed"]}"}}'


def test_server_error_fails_only_its_rollout(server):
    with served(base_url=server) as environment:
        with refused("environment_error", "EXECUTION_ERROR: the game has crashed"):
            asyncio.run(play(environment, first(environment), lambda _: "crash"))
        with refused("environment_timeout"):
            asyncio.run(play(environment, first(environment), lambda _: "hang", timeout=1.0))
    with served(base_url=server, reset={"unrewarded": True}) as environment, refused("bad_reward"):
        asyncio.run(play(environment, first(environment), color_of))
    with served(base_url=server, prompt="{image}{board}") as environment, refused("environment_error", "'board'"):
        asyncio.run(play(environment, first(environment), color_of))


def test_dead_environment_server_is_restarted(started):
    with refused("environment_error"):
        asyncio.run(play(started, first(started), lambda _: "die"))
    assert (
        isinstance(started, OpenEnvEnvironment) and started._server is not None and started._server._program is not None
    )
    started._server._program.wait(60)
    (outcome,) = asyncio.run(play(started, first(started), color_of, timeout=120.0))
    assert outcome.reward_parts == {"reward": 1.0}


def test_server_command_failure_includes_output():
    command = [str(PYTHON), "-c", "import sys; sys.exit('no such game')", "{port}"]
    with (
        closing(make_environment(settings(command=command))) as environment,
        pytest.raises(ConfigurationError) as caught,
    ):
        environment.episode(first(environment))
    assert "no such game" in caught.exconly()
