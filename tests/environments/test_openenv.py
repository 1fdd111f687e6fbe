"""The environment `openenv` with servers that answer wrongly; tests/interop/openenv tests it with OpenEnv itself."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from armature.components.configuration import load_recipe
from armature.components.contracts.episodes import Outcome
from armature.components.environments.make import make_environment
from armature.components.environments.openenv.messages import NoAction, action_of, to_observation
from armature.components.environments.openenv.settings import OpenEnvSettings
from armature.components.environments.settings import EnvironmentSettings
from tests.refusals import refused

PAGE = Path(__file__).resolve().parents[2] / "docs/openenv.md"
SETTINGS: dict[str, Any] = {"base_url": "http://127.0.0.1:9", "max_turns": 1}


def reply(**data: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"board": "x"}, "done": False, "reward": 0.5, **data}}


GOOD = reply(reward=None)


def failed(code: str, text: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": text}}


@asynccontextmanager
async def answering(*answers: Any) -> Any:
    """The address and the requests of a server that sends these answers in turn; None closes the connection."""
    left = iter(answers)
    requests: list[dict[str, Any]] = []

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        requests.append({"authorization": request.headers.get("Authorization")})
        async for message in socket:
            requests.append(json.loads(message.data))
            answer = next(left, None)
            if answer is None:
                break
            if isinstance(answer, bytes):
                await socket.send_bytes(answer)
            else:
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/games/ws", session)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/games/", requests
    finally:
        await runner.cleanup()


def play(*answers: Any, **args: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    """Play reset and one step with a server that sends `answers`; return the outcome and the server's requests."""

    async def one() -> tuple[Outcome, list[dict[str, Any]]]:
        async with answering(*answers) as (url, requests):
            values = {"base_url": url, "action": {"move": "{completion}"}, "max_turns": 3} | args
            settings = EnvironmentSettings(name="openenv", args=values, train_tasks=2, heldout_tasks=2)
            environment = make_environment(settings)
            episode = environment.episode(next(iter(environment.tasks("train"))))
            try:
                await episode.reset()
                return await episode.step("left"), requests
            finally:
                await episode.close()

    return asyncio.run(one())


def test_messages_follow_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAMES", "abc")
    outcome, requests = play(GOOD, reply(done=True), reset={"level": 3}, api_key={"env": "GAMES"})
    assert outcome.done and outcome.reward_parts == {"reward": 0.5}
    assert requests == [
        {"authorization": "Bearer abc"},
        {"type": "reset", "data": {"level": 3, "seed": 0}},
        {"type": "step", "data": {"move": "left"}},
        {"type": "close"},
    ]


@pytest.mark.parametrize(
    ("answers", "reason", "value"),
    [
        ([None], "environment_error", "CLOSE"),
        ([b"bytes"], "environment_error", "BINARY"),
        (["{"], "environment_error", "JSON"),
        (["[" * 100_000], "environment_error", "JSON"),
        (["[]"], "environment_error", "'[]'"),
        ([{"type": "state", "data": {}}], "environment_error", "'state'"),
        ([reply(observation="text")], "environment_error", "observation"),
        ([reply(done="no")], "environment_error", "done"),
        ([reply(done=True)], "environment_error", ""),
        ([failed("FACTORY_ERROR", "no game")], "environment_error", "FACTORY_ERROR: no game"),
        ([GOOD, reply(reward="1")], "bad_reward", "'1'"),
        ([GOOD, reply(reward=float("nan"))], "bad_reward", "nan"),
        ([GOOD, reply(done=True, reward=None)], "bad_reward", ""),
        ([GOOD, None], "environment_error", "CLOSE"),
    ],
)
def test_invalid_server_answer_fails_the_rollout(answers: list[Any], reason: str, value: str) -> None:
    with refused(reason, value):
        play(*answers)


def test_unreachable_server_fails_the_rollout() -> None:
    with refused("environment_error", "127.0.0.1:9"):
        play(base_url="http://127.0.0.1:9/")


def test_reset_retries_while_server_is_full() -> None:
    full = failed("CAPACITY_REACHED", "1 of 1")
    outcome, requests = play(full, full, GOOD, reply(done=True))
    assert outcome.done and [each.get("type") for each in requests].count("reset") == 3


def test_splits_never_share_a_seed() -> None:
    seen: set[int] = set()
    for seed in (0, 1, 2**31 - 1):
        settings = EnvironmentSettings(name="openenv", args=SETTINGS, train_tasks=50, heldout_tasks=50, seed=seed)
        environment = make_environment(settings)
        for split in ("train", "heldout"):
            seen |= {task.payload["seed"] for task in environment.tasks(split)}  # type: ignore[arg-type]
    assert len(seen) == 300 and max(seen) < 2**31


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth > 1 else []


NO_ACTION = [
    *("", "[1]", '{"a": NaN}', '{"a": 1e400}', '{"a": [{"b": -1e999}]}', '{"a": "\\ud800"}', '{"\\udfff": 1}'),
    *('{"a": ' + "9" * 5000 + "}", "{" * 100_000 + "}"),
]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ('first {"a": 1}, then {"a": 2}.', {"a": 2}),
        ('{wrong {"a": "}"} ', {"a": "}"}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", {"a": nested(900)}),
    ],
)
def test_action_is_the_last_json_object_of_an_answer(text: str, action: dict[str, Any]) -> None:
    assert action_of(text, OpenEnvSettings(**SETTINGS)) == action


@pytest.mark.parametrize("text", NO_ACTION, ids=lambda text: text[:12])
def test_answer_without_valid_json_object_raises_no_action(text: str) -> None:
    with pytest.raises(NoAction):
        action_of(text, OpenEnvSettings(**SETTINGS))


@pytest.mark.parametrize("screen", ["iVBORw0KGgo=@", "http://169.254.169.254/x.png", [[300]], [[1.5]], [], 7, {}])
def test_invalid_image_field_fails_the_rollout(screen: Any) -> None:
    settings = OpenEnvSettings(**SETTINGS, images=("screen",))
    with refused("bad_image"):
        to_observation({"screen": screen}, settings)
    assert to_observation({"screen": None, "text": "é"}, settings).content == ('{"text": "é"}',)


@pytest.mark.parametrize(
    ("args", "code", "value"),
    [
        ({}, "base_url_or_command", ""),
        ({"base_url": "http://h:1", "command": ["serve", "{port}"]}, "base_url_or_command", ""),
        ({"command": ["serve"]}, "port_place_missing", "{port}"),
        ({"base_url": "ftp://h"}, "string_pattern_mismatch", "base_url"),
        ({"base_url": "http://me:secret@h"}, "plain_secret", "base_url"),
        ({"base_url": "http://h", "api_key": "sk-secret"}, "plain_secret", "api_key"),
        ({"base_url": "http://h", "action": {"move": "left"}}, "completion_place_missing", "{completion}"),
        ({"base_url": "http://h", "reset": {"seed": 1}}, "seed_not_settable", "environment.seed"),
        ({"base_url": "http://h", "images": ["screen"], "prompt": "{text}"}, "image_places_mismatch", "images"),
        ({"base_url": "http://h", "prompt": "{text"}, "value_error", "prompt"),
    ],
)
def test_rejects_contradictory_settings(args: dict[str, Any], code: str, value: str) -> None:
    with refused(code, value):
        OpenEnvSettings(max_turns=1, **args)


def test_recipe_in_docs_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 20
    (tmp_path / "own.toml").write_text(text)
    settings: Any = load_recipe(str(tmp_path / "own.toml")).sections["environment"]
    assert settings.args["command"][0] == "openenv/bin/python" and settings.args["reset"] == {}
