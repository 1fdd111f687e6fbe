"""The bridge against the real verifiers package; each part runs where the installed version has its interface."""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from components.contracts.episodes import Observation, Task
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.failures import RolloutFailed
from components.contracts.images import EncodedImage
from components.environments.make import make_environment
from components.environments.settings import EnvironmentSettings
from components.environments.verifiers import VerifiersEnvironment

INSTALL = "needs the extra: pip install 'armature-vla[verifiers]'"
HAS_VERIFIERS = find_spec("verifiers") is not None
HAS_LEGACY = HAS_VERIFIERS and find_spec("verifiers.envs") is not None
HAS_V1 = HAS_VERIFIERS and not HAS_LEGACY  # 0.2 and 0.3 have an unfinished v1

legacy = pytest.mark.skipif(not HAS_LEGACY, reason=INSTALL if not HAS_VERIFIERS else "verifiers >= 0.4 is installed")
v1 = pytest.mark.skipif(not HAS_V1, reason=INSTALL if not HAS_VERIFIERS else "verifiers < 0.4 is installed")


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "samples"))
    yield
    for name in [name for name in sys.modules if name.startswith("sample_")]:
        del sys.modules[name]


def environment(id: str, interface: str = "legacy", max_turns: int = 6, **changes: Any) -> VerifiersEnvironment:
    args = changes.pop("args", {})
    values = {"train_tasks": 6, "heldout_tasks": 3, "seed": 5, **changes}
    bridge = {"interface": interface, "id": id, "args": args, "max_turns": max_turns}
    made = make_environment(EnvironmentSettings(name="verifiers", args=bridge, **values))
    assert isinstance(made, VerifiersEnvironment)
    return made


async def play(
    bridge: VerifiersEnvironment, task: Task, answer: Callable[[int, Observation], str]
) -> tuple[list[Observation], dict[str, float], bool]:
    episode = bridge.episode(task)
    try:
        observations = [await episode.reset()]
        for turn in range(bridge.max_turns):
            outcome = await episode.step(answer(turn, observations[-1]))
            if outcome.observation is None:
                return observations, dict(outcome.reward_parts), True
            observations.append(outcome.observation)
        return observations, {}, False
    finally:
        await episode.close()
        await episode.close()


def run(bridge: VerifiersEnvironment, task: Task, answer: Callable[[int, Observation], str]) -> Any:
    return asyncio.run(asyncio.wait_for(play(bridge, task, answer), 60))


def color_of(observation: Observation) -> str:
    from io import BytesIO

    from PIL import Image

    (image,) = (part for part in observation.content if isinstance(part, EncodedImage))
    with Image.open(BytesIO(image.data)) as opened:
        pixel = opened.convert("RGB").getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return ("red", "green", "blue")[pixel.index(max(pixel))]


# --- legacy -----------------------------------------------------------------------------------------------------


@legacy
def test_a_single_turn_environment_is_played_and_scored_by_its_rubric() -> None:
    bridge = environment("sample-colors")
    assert bridge.max_turns == 1 and bridge.system_prompt == "One word."
    for task in bridge.tasks("train"):
        observations, parts, done = run(bridge, task, lambda turn, observation: color_of(observation))
        (shown,) = observations
        assert isinstance(shown.content[0], EncodedImage) and str(shown.content[1]).startswith("What colour is")
        assert done and parts["correct"] == 1.0 and parts["length"] == len(color_of(shown))
        assert parts["reward"] == pytest.approx(1.0 + 0.1 * parts["length"])
        assert bridge.reward_weights["reward"] == 1.0
        assert {name: bridge.reward_weights[name] for name in parts if name != "reward"} == dict.fromkeys(
            set(parts) - {"reward"}, 0.0
        )
        assert run(bridge, task, lambda *_: "mauve")[1]["correct"] == 0.0


@legacy
def test_splits_of_one_data_set_are_disjoint_and_repeat() -> None:
    bridge = environment("sample-colors")
    rows = [task.payload["row"] for split in ("train", "heldout") for task in bridge.tasks(split)]  # type: ignore[arg-type]
    assert len(rows) == 9 == len(set(rows))
    assert [list(bridge.tasks("train"))] == [list(environment("sample-colors").tasks("train"))]
    assert list(bridge.tasks("train")) != list(environment("sample-colors", seed=6).tasks("train"))


@legacy
def test_an_environment_with_a_data_set_for_evaluation_keeps_it_for_that() -> None:
    bridge = environment("sample-colors", args={"heldout": 3})
    identities = {split: {task.payload["identity"] for task in bridge.tasks(split)} for split in ("train", "heldout")}  # type: ignore[arg-type]
    assert len(identities["heldout"]) == 3 and not identities["train"] & identities["heldout"]
    with pytest.raises(ConfigurationError, match="10 rows are requested and the environment has 3"):
        list(environment("sample-colors", args={"heldout": 3}, heldout_tasks=10).tasks("heldout"))
    with pytest.raises(ConfigurationError, match="13 rows are requested and the environment has 12"):
        list(environment("sample-colors", train_tasks=10).tasks("train"))


@legacy
def test_rows_that_changed_are_noticed() -> None:
    task = next(iter(environment("sample-colors").tasks("train")))
    with pytest.raises(DataError, match="not the one that the task was made from"):
        environment("sample-colors", args={"size": 20}).episode(task)


@legacy
def test_a_multi_turn_environment_is_played_turn_by_turn() -> None:
    bridge = environment("sample-guess", max_turns=8)
    task = next(iter(bridge.tasks("train")))
    low, high = [0], [7]

    def bisect(turn: int, observation: Observation) -> str:
        guess = (low[-1] + high[-1]) // 2
        if turn:
            assert color_of(observation) == {"more": "red", "less": "blue"}[str(observation.content[0])]
            if observation.content[0] == "more":
                low.append(previous[-1] + 1)
            else:
                high.append(previous[-1] - 1)
            guess = (low[-1] + high[-1]) // 2
        previous.append(guess)
        return str(guess)

    previous: list[int] = []
    observations, parts, done = run(bridge, task, bisect)
    assert done and parts["right"] == 1.0 and parts["reward"] == 1.0
    assert len(observations) == len(previous) <= 4 and parts["num_turns"] == len(previous)


@legacy
def test_the_turn_limit_ends_and_scores_the_episode() -> None:
    for bridge in (environment("sample-guess", max_turns=3), environment("sample-guess", args={"max_turns": 3})):
        assert bridge.max_turns == 3
        task = next(task for task in bridge.tasks("train"))
        wrong = [n for n in "01234567" if run(bridge, task, lambda turn, o, n=n: n)[1]["reward"] == 0.0]
        assert len(wrong) == 7
        observations, parts, done = run(bridge, task, lambda turn, o, n=wrong[0]: n)
        assert done and len(observations) == 3 and parts["reward"] == 0.0


@legacy
def test_many_episodes_at_once_do_not_mix() -> None:
    bridge = environment("sample-colors")

    async def all_at_once() -> list[Any]:
        tasks = [task for task in bridge.tasks("train") for _ in range(8)]
        return await asyncio.gather(*(play(bridge, task, lambda turn, o: color_of(o)) for task in tasks))

    assert all(parts["correct"] == 1.0 for _, parts, _ in asyncio.run(all_at_once()))


@legacy
def test_an_environment_can_be_made_in_any_thread_and_leaves_signals_alone() -> None:
    import signal

    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    made: list[VerifiersEnvironment] = []
    thread = threading.Thread(target=lambda: made.append(environment("sample-colors")))
    thread.start()
    thread.join()
    assert made and (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@legacy
def test_what_the_environment_gets_wrong_ends_its_episode() -> None:
    bridge = environment("sample-guess", args={"fail": True})
    task = next(iter(bridge.tasks("train")))
    with pytest.raises(RolloutFailed, match="the game has crashed"):
        run(bridge, task, lambda *_: "9")
    bridge = environment("sample-guess", args={"rewrite": True})
    with pytest.raises(RolloutFailed, match="rewrote earlier messages"):
        run(bridge, task, lambda *_: "9")


@legacy
@pytest.mark.parametrize("silence", ["", " ", "\n"])
def test_to_say_nothing_is_an_answer_that_the_environment_scores(silence: str) -> None:
    bridge = environment("sample-colors")
    task = next(iter(bridge.tasks("train")))
    _, parts, done = run(bridge, task, lambda *_: silence)
    assert done and parts["correct"] == 0.0 and parts["length"] == 0.0 and parts["reward"] == 0.0
    bridge = environment("sample-guess", args={"lenient": True}, max_turns=3)
    observations, parts, done = run(bridge, next(iter(bridge.tasks("train"))), lambda *_: silence)
    assert done and len(observations) == 3 and parts["right"] == 0.0 and parts["reward"] == 0.0


@legacy
def test_an_episode_given_up_leaves_nothing_running() -> None:
    async def give_up() -> set[Any]:
        bridge = environment("sample-guess")
        episode = bridge.episode(next(iter(bridge.tasks("train"))))
        await episode.reset()
        await episode.close()
        await asyncio.sleep(0.1)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(give_up()) == set()


@legacy
def test_contents_that_can_be_read_once_are_made_lists() -> None:
    from collections.abc import Iterable

    from components.environments.verifiers.legacy import materialized

    class Message(BaseModel):
        content: Iterable[dict[str, str]]

    once = Message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).content
    assert not isinstance(once, list)
    kept = materialized({"prompt": [{"content": once}]})
    assert [list(kept["prompt"][0]["content"]) for _ in range(2)] == [
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ] * 2
    assert materialized({"a": "text", "b": b"bytes", "c": (1, 2)}) == {"a": "text", "b": b"bytes", "c": [1, 2]}


# --- v1 ---------------------------------------------------------------------------------------------------------


@v1
def test_a_taskset_is_played_through_its_harness() -> None:
    bridge = environment("sample-taskset", "v1", args={"agent": {"harness": {"id": "sample-taskset"}}})
    assert bridge.system_prompt == "One word."
    for task in list(bridge.tasks("train"))[:3]:
        shown: list[Observation] = []

        def look(turn: int, observation: Observation, shown: list[Observation] = shown) -> str:
            shown.append(observation)
            return color_of(shown[0])

        observations, parts, done = run(bridge, task, look)
        assert done and [observation.content[-1] for observation in observations][1:] == ["Sure? 0"]
        assert parts == {"reward": 2.0, "correct": 1.0, "turns": 2.0}
        assert run(bridge, task, lambda *_: "mauve")[1] == {"reward": 0.0, "correct": 0.0, "turns": 2.0}


@v1
def test_to_say_nothing_is_an_answer_to_a_taskset() -> None:
    bridge = environment("sample-taskset", "v1", args={"agent": {"harness": {"id": "sample-taskset"}}})
    _, parts, done = run(bridge, next(iter(bridge.tasks("train"))), lambda *_: "")
    assert done and parts == {"reward": 0.0, "correct": 0.0, "turns": 2.0}


@v1
def test_a_tasksets_tasks_are_split() -> None:
    bridge = environment("sample-taskset", "v1", args={"agent": {"harness": {"id": "sample-taskset"}}})
    rows = [task.payload["row"] for split in ("train", "heldout") for task in bridge.tasks(split)]  # type: ignore[arg-type]
    assert len(rows) == 9 == len(set(rows))


# --- either -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(HAS_VERIFIERS, reason="verifiers is installed")
def test_without_the_package_the_error_names_the_command() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'armature-vla\[verifiers\]'"):
        environment("sample-colors")


@pytest.mark.skipif(not HAS_VERIFIERS, reason=INSTALL)
def test_an_interface_that_the_installed_version_lacks_names_the_other() -> None:
    missing = "v1" if HAS_LEGACY else "legacy"
    with pytest.raises(ConfigurationError, match=f'interface = "{"legacy" if HAS_LEGACY else "v1"}"'):
        environment("sample-colors", missing)


def chat(port: int, path: str, body: bytes) -> bytes:
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection.makefile("rb").read()


def test_the_endpoint_answers_its_own_path_only() -> None:
    from urllib.parse import urlsplit

    from components.environments.verifiers.endpoint import ChatEndpoint

    async def talk() -> None:
        endpoint = ChatEndpoint()
        url = urlsplit(await endpoint.start())
        assert url.hostname == "127.0.0.1" and url.port is not None
        assert b"404" in await asyncio.to_thread(chat, url.port, "/v1/chat/completions", b"{}")
        for stream, mark in (
            (b"false", b'"message": {"role": "assistant", "content": "red"}'),
            (b"true", b"data: [DONE]"),
        ):
            body = b'{"messages": [{"role": "user", "content": "?"}], "stream": ' + stream + b"}"
            reply = asyncio.create_task(asyncio.to_thread(chat, url.port, f"{url.path}/chat/completions", body))
            asked = await endpoint.next()
            assert asked.messages == [{"role": "user", "content": "?"}]
            asked.answer.set_result("red")
            assert mark in await reply
        tools = b'{"messages": [], "tools": [{"type": "function"}]}'
        assert b"400" in await asyncio.to_thread(chat, url.port, f"{url.path}/chat/completions", tools)
        with pytest.raises(ValueError, match="tools"):
            await endpoint.next()
        endpoint.close()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}], "by URL"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "by URL"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}], "damaged"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
    ],
)
def test_content_that_is_neither_text_nor_an_inline_image_is_refused(parts: list[Any], said: str) -> None:
    from components.environments.verifiers.episode import content

    with pytest.raises(ValueError, match=said):
        content({"role": "user", "content": parts})
    good = base64.b64encode(b"bytes").decode()
    assert content({"content": [{"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{good}"}}]}) == (
        EncodedImage(b"bytes", "image/webp"),
    )
