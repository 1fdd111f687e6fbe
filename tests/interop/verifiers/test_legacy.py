"""The bridge against verifiers 0.3, the last release with `load_environment`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from pydantic import BaseModel

from armature.components.contracts.episodes import ChatAnswer, EarlierMessage, Observation
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.tool_calls import ToolCall
from armature.components.environments.verifiers import VerifiersEnvironment
from tests.refusals import refused

from .bridge import color_of, environment, play, run


def test_single_turn_environment_is_scored_by_its_rubric():
    bridge = environment("sample-colors")
    assert bridge.max_turns == 1
    for task in bridge.tasks("train"):
        observations, parts, done = run(bridge, task, lambda turn, observation: color_of(observation))
        (shown,) = observations
        assert shown.request is not None
        assert shown.request.messages[0] == EarlierMessage("system", ("One word.",))
        assert isinstance(shown.content[0], EncodedImage) and str(shown.content[1]).startswith("What colour is")
        assert done and parts["correct"] == 1.0 and parts["length"] == len(color_of(shown))
        assert parts["reward"] == pytest.approx(1.0 + 0.1 * parts["length"])
        assert bridge.reward_weights["reward"] == 1.0
        assert {name: bridge.reward_weights[name] for name in parts if name != "reward"} == dict.fromkeys(
            set(parts) - {"reward"}, 0.0
        )
        assert run(bridge, task, lambda *_: "mauve")[1]["correct"] == 0.0


def test_splits_of_one_dataset_are_disjoint_and_repeatable():
    bridge = environment("sample-colors")
    rows = [task.payload["row"] for split in ("train", "heldout") for task in bridge.tasks(split)]  # type: ignore[arg-type]
    assert len(rows) == 9 == len(set(rows))
    assert [list(bridge.tasks("train"))] == [list(environment("sample-colors").tasks("train"))]
    assert list(bridge.tasks("train")) != list(environment("sample-colors", seed=6).tasks("train"))


def test_evaluation_dataset_is_only_used_for_evaluation():
    bridge = environment("sample-colors", args={"heldout": 3})
    identities = {split: {task.payload["identity"] for task in bridge.tasks(split)} for split in ("train", "heldout")}  # type: ignore[arg-type]
    assert len(identities["heldout"]) == 3 and not identities["train"] & identities["heldout"]
    for split, settings in (("heldout", {"args": {"heldout": 3}, "heldout_tasks": 10}), ("train", {"train_tasks": 10})):
        with pytest.raises(ConfigurationError) as caught:
            list(environment("sample-colors", **settings).tasks(split))  # type: ignore[arg-type]
        assert caught.value.where == f"{split}_tasks"


def test_changed_rows_change_the_fingerprint():
    task = next(iter(environment("sample-colors").tasks("train")))
    with pytest.raises(DataError) as caught:
        environment("sample-colors", args={"size": 20}).episode(task)
    assert caught.value.where == task.task_id


def test_multi_turn_environment_is_played_turn_by_turn():
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


def test_turn_limit_ends_and_scores_the_episode():
    for bridge in (environment("sample-guess", max_turns=3), environment("sample-guess", args={"max_turns": 3})):
        assert bridge.max_turns == 3
        task = next(task for task in bridge.tasks("train"))
        wrong = [n for n in "01234567" if run(bridge, task, lambda turn, o, n=n: n)[1]["reward"] == 0.0]
        assert len(wrong) == 7
        observations, parts, done = run(bridge, task, lambda turn, o, n=wrong[0]: n)
        assert done and len(observations) == 3 and parts["reward"] == 0.0


def test_concurrent_episodes_do_not_mix():
    bridge = environment("sample-colors")

    async def all_at_once() -> list[Any]:
        tasks = [task for task in bridge.tasks("train") for _ in range(8)]
        return await asyncio.gather(*(play(bridge, task, lambda turn, o: color_of(o)) for task in tasks))

    assert all(parts["correct"] == 1.0 for _, parts, _ in asyncio.run(all_at_once()))


def test_environment_loads_in_any_thread_without_signal_handlers():
    import signal

    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    made: list[VerifiersEnvironment] = []
    thread = threading.Thread(target=lambda: made.append(environment("sample-colors")))
    thread.start()
    thread.join()
    assert made and (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_environment_error_ends_only_its_episode():
    bridge = environment("sample-guess", args={"fail": True})
    task = next(iter(bridge.tasks("train")))
    with refused("environment_error", "the game has crashed"):
        run(bridge, task, lambda *_: "9")


def test_environment_may_rewrite_earlier_messages():
    bridge = environment("sample-guess", args={"rewrite": True}, max_turns=2)
    observations, _, done = run(bridge, next(iter(bridge.tasks("train"))), lambda *_: "9")
    assert done and observations[1].request is not None
    assert observations[1].request.messages[0].content == ("Something else.",)


@pytest.mark.parametrize("silence", ["", " ", "\n"])
def test_empty_answer_is_scored_by_the_environment(silence):
    bridge = environment("sample-colors")
    task = next(iter(bridge.tasks("train")))
    _, parts, done = run(bridge, task, lambda *_: silence)
    assert done and parts["correct"] == 0.0 and parts["length"] == 0.0 and parts["reward"] == 0.0
    bridge = environment("sample-guess", args={"lenient": True}, max_turns=3)
    observations, parts, done = run(bridge, next(iter(bridge.tasks("train"))), lambda *_: silence)
    assert done and len(observations) == 3 and parts["right"] == 0.0 and parts["reward"] == 0.0


def test_abandoned_episode_leaves_no_task_running():
    async def give_up() -> set[Any]:
        bridge = environment("sample-guess")
        episode = bridge.episode(next(iter(bridge.tasks("train"))))
        await episode.reset()
        await episode.close()
        await asyncio.sleep(0.1)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(give_up()) == set()


def test_one_shot_contents_become_lists():
    from collections.abc import Iterable

    from armature.components.environments.verifiers.legacy import materialized

    class Message(BaseModel):
        content: Iterable[dict[str, str]]

    once = Message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).content
    assert not isinstance(once, list)
    saved = materialized({"prompt": [{"content": once}]})
    assert [list(saved["prompt"][0]["content"]) for _ in range(2)] == [
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ] * 2
    assert materialized({"a": "text", "b": b"bytes", "c": (1, 2)}) == {"a": "text", "b": b"bytes", "c": [1, 2]}


def test_v1_interface_needs_a_later_release():
    with pytest.raises(ConfigurationError) as caught:
        environment("sample-colors", "v1")
    assert 'interface = "legacy"' in caught.exconly()


def test_tools_of_an_environment_are_offered_and_called():
    bridge = environment("sample-tools", max_turns=4)
    task = next(iter(bridge.tasks("train")))

    async def talk():
        episode = bridge.episode(task)
        try:
            asked = (await episode.reset()).request
            (tool,) = asked.tools
            number = int(asked.messages[-1].content[0].split(" ")[0])
            text = f"<tool_call>{number}</tool_call>"
            call = ToolCall(tool["function"]["name"], {"one": number, "other": 1})
            shown = await episode.answer(ChatAnswer(f"I add. {text}", (call,), at=len("I add. ")))
            _, answer, result = shown.observation.request.messages
            assert "".join(answer.content) == f"I add. {text}"
            assert (result.role, result.name, result.content) == ("tool", "add", (str(number + 1),))
            return await episode.step(result.content[0])
        finally:
            await episode.close()

    outcome = asyncio.run(asyncio.wait_for(talk(), 60))
    assert outcome.observation is None and outcome.reward_parts["right"] == 1.0
