"""The policy calls the MCP tools of a server that is written with openenv."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from armature.components.artifacts.images import decode
from armature.components.contracts.episodes import ChatAnswer, Environment, Outcome
from armature.components.contracts.errors import RolloutFailed
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.tool_calls import ToolCall
from armature.components.environments.guarded import GuardedEpisode
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from tests.refusals import refused

PYTHON = Path(__file__).parents[3] / ".venv-programs/bin/python"
SERVER = Path(__file__).with_name("tool_server.py")
COLORS = {(255, 0, 0): "red", (0, 255, 0): "green", (0, 0, 255): "blue"}


def settings(server: Path, **args: Any) -> EnvironmentSettings:
    command = [str(PYTHON), str(server), "--port", "{port}"]
    given = {"command": command, "own_tools": True, "max_turns": 4, "invalid_reward": -1.0, "start_timeout": 120}
    return EnvironmentSettings(name="openenv", args=given | args, train_tasks=6, heldout_tasks=3, seed=1)


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    with closing(make_environment(settings(SERVER, system_prompt="Play."))) as environment:
        yield environment


def answer(text: str, *calls: ToolCall) -> ChatAnswer:
    return ChatAnswer(text, calls, at=0 if calls else None)


async def play(environment: Environment, number: int, *answers: ChatAnswer) -> list[Outcome]:
    episode = GuardedEpisode(environment, list(environment.tasks("train"))[number], 60.0)
    try:
        first = await episode.reset()
        return [Outcome(first), *[await episode.answer(each) for each in answers]]
    finally:
        await episode.close()


def test_calls_are_steps_and_results_are_shown(environment):
    look = answer("<look>", ToolCall("look", {"side": 8}))
    for number in range(3):
        start, seen = asyncio.run(play(environment, number, look))
        assert start.observation is not None and start.observation.request is not None
        offered = {tool["function"]["name"]: tool["function"] for tool in start.observation.request.tools}
        assert set(offered) == {"look", "name"} and offered["look"]["description"] == "Look at the color."
        assert offered["name"]["parameters"]["properties"]["color"]["type"] == "string"
        assert [message.role for message in start.observation.request.messages] == ["system", "user"]
        assert seen.observation is not None and seen.observation.request is not None and seen.reward_parts == {}
        *_, policy, result = seen.observation.request.messages
        assert (policy.content, result.role, result.name) == (("<look>",), "tool", "look")
        text, image = result.content
        assert isinstance(image, EncodedImage) and (text, image.media_type) == ("Here it is.", "image/png")
        color = COLORS[decode(image).convert("RGB").getpixel((4, 4))]  # type: ignore[index]
        for name, reward in (("no color", 0.0), (color, 1.0)):
            both = answer("x", ToolCall("look", {"side": 8}), ToolCall("name", {"color": name}))
            _, _, done = asyncio.run(play(environment, number, look, both))
            assert done.done and done.reward_parts == {"reward": reward}


def test_bad_calls_are_shown_and_answers_without_calls_are_actions(environment):
    calls = [ToolCall("fly"), ToolCall("look", {"side": "wide"}), ToolCall("look", {"side": 8, "more": 1})]
    _, seen = asyncio.run(play(environment, 0, answer("x", *calls)))
    assert seen.observation is not None and seen.observation.request is not None
    results = seen.observation.request.messages[-3:]
    assert [str(result.content[0]).partition(":")[0] for result in results] == ["Error"] * 3
    _, ended = asyncio.run(play(environment, 0, answer("It is red.")))
    assert ended.done and (ended.action_defect, ended.reward_parts) == ("format", {"reward": -1.0})
    _, too_long = asyncio.run(play(environment, 0, ChatAnswer("", refusal="too long")))
    assert too_long.done and too_long.reward_parts == {"reward": -1.0}


def test_recipe_cannot_add_tools_to_those_of_the_server():
    with refused("tools_of_program"):
        make_environment(settings(SERVER).model_copy(update={"tools": ("zoom",)}))


def test_server_without_tools_fails_its_rollouts():
    with closing(make_environment(settings(SERVER.with_name("server.py")))) as environment:
        with pytest.raises(RolloutFailed) as failed:
            asyncio.run(play(environment, 0))
        assert failed.value.reason == "environment_error"
