"""Episodes with tools: calls in sampled text, their results in the next prompt, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from PIL import Image

from armature.components.contracts.images import EncodedImage
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.contracts.tool_calls import CalledTool
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.tools.tool import ToolError
from armature.components.inference.client import GenerationFailure
from armature.components.inference.tool_calls import ToolFormat
from armature.components.rl.metrics import rollout_metrics
from armature.components.rollouts.collect import collect
from armature.components.rollouts.table import read_rollouts, write_rollouts
from tests.builders import make_machine

from .conftest import SAMPLING, ScriptedPolicy

NATIVE = ToolFormat(renders_tools=True, renders_results=True, reserved=("<|im_end|>",))


@dataclass
class ToolPolicy(ScriptedPolicy):
    """A policy from a script that also records the tools it is offered."""

    tool_format: ToolFormat = field(default_factory=ToolFormat)
    offered: Sequence[Mapping[str, Any]] = ()

    async def complete(self, messages: Any, sampling: Any, seed: int, tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        self.offered = tools
        return await super().complete(json.loads(json.dumps(messages)), sampling, seed)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(*texts: str) -> Callable[..., str]:
    """Return a script that gives one text after the other, by the number of earlier answers."""
    return lambda messages, seed: texts[sum(one["role"] == "assistant" for one in messages)]


def play(policy: ScriptedPolicy, store: Any, events: Any, **settings: Any) -> GenerateOutputs:
    options = {"name": "colors", "args": {"image_size": 28}, "train_tasks": 1, "heldout_tasks": 1} | settings
    environment = make_environment(EnvironmentSettings(**options), 1)
    try:
        task = next(iter(environment.tasks("train")))
        return asyncio.run(
            collect(
                environment, [task], 1, policy, store, SAMPLING, step=1, seed=0, machine=make_machine(), events=events
            )
        )
    finally:
        environment.close()


def statuses(one: Trajectory) -> list[list[tuple[str, str]]]:
    return [[(called.name, called.status) for called in turn.tool_calls] for turn in one.turns]


@pytest.mark.parametrize("form", [ToolFormat(), NATIVE], ids=["system-prompt", "template"])
def test_calls_are_run_and_shown_and_the_last_answer_is_graded(form, store, events, tmp_path) -> None:
    texts = [call("crop", box=[0, 0, 7, 5]) + "\n" + call("calculator", expression="6*7"), "red"]
    policy = ToolPolicy(answers(*texts), tool_format=form)
    outputs = play(policy, store, events, tools=["crop", "calculator"])
    (one,) = outputs.trajectories
    assert (one.reward, one.truncated, len(one.turns)) == (1.0, False, 2)
    assert statuses(one) == [[("crop", "ok"), ("calculator", "ok")], []]
    assert [(ref.width, ref.height) for ref in one.turns[1].images] == [(28, 28), (7, 5)]
    assert one.turns[0].completion == texts[0]
    assert one.turns[0].reward_parts == {}
    messages, _ = policy.requests[1]
    roles = [each["role"] for each in messages]
    text = json.dumps(messages)
    if form is NATIVE:
        assert roles == ["user", "assistant", "tool", "tool"]
        assert [each["function"]["name"] for each in policy.offered] == ["crop", "calculator"]
        assert messages[3]["content"] == [{"type": "text", "text": "42"}]
    else:
        assert roles == ["system", "user", "assistant", "user"]
        assert not policy.offered
        assert '"calculator"' in messages[0]["content"]
        assert text.count("<tool_response>") == 2
    assert messages[roles.index("assistant")]["content"] == texts[0]
    metrics = rollout_metrics(outputs)
    assert (metrics["tools/used"], metrics["tools/calls"], metrics["tool_of/crop"]) == (1.0, 2.0, 0.5)
    write_rollouts(tmp_path, outputs)
    assert read_rollouts(tmp_path).trajectories[0].turns[0].tool_calls[0] == CalledTool("crop", "ok")


def test_faulty_calls_are_shown_and_counted_and_end_at_the_budget(store, events) -> None:
    texts = ["<tool_call>{", call("search", q="x"), call("crop", box=[0, 0]), call("crop", box="all"), call("crop")]
    policy = ToolPolicy(answers(*texts))
    outputs = play(policy, store, events, tools=["crop"], max_tool_calls=4)
    (one,) = outputs.trajectories
    ends = [[("", "malformed")], [("search", "unknown")], [("crop", "error")], [("crop", "arguments")], []]
    assert statuses(one) == ends
    assert not outputs.failures
    assert one.reward == 0.0  # the fifth text is the answer
    assert all("Error: " in json.dumps(messages[-1]) for messages, _ in policy.requests[1:])
    metrics = rollout_metrics(outputs)
    assert (metrics["tools/used"], metrics["tool_status/malformed"]) == (0.0, 0.25)


def test_more_calls_in_a_turn_than_are_left_are_not_run(store, events) -> None:
    texts = [call("calculator", expression="1") * 3, "red"]
    (one,) = play(ToolPolicy(answers(*texts)), store, events, tools=["calculator"], max_tool_calls=2).trajectories
    assert [status for _, status in statuses(one)[0]] == ["ok", "ok", "no_calls_left"]


def test_special_tokens_in_results_do_not_end_a_turn(store, events) -> None:
    texts = [call("python", code="print('<|im_end|>', 1 + 1)"), "red"]
    policy = ToolPolicy(answers(*texts), tool_format=NATIVE)
    play(policy, store, events, tools=["python"], tool_timeout=300)
    assert policy.requests[1][0][-1]["content"][0]["text"].split() == ["<", "|im_end|>", "2"]


def test_policy_that_calls_for_too_many_images_keeps_its_rewards(store, events) -> None:
    def script(messages: Sequence[Mapping[str, Any]], seed: int) -> str:
        if len(messages) > 3:
            raise GenerationFailure("at most 1 image(s) may be provided", reason="too_many_images")
        return call("crop", box=[0, 0, 7, 7])

    outputs = play(ToolPolicy(script), store, events, tools=["crop"])
    assert [one.truncated for one in outputs.trajectories] == [True]
    assert outputs.drops == {}


def test_results_of_tools_are_part_of_a_conversation_without_dialogue(store, events) -> None:
    recall = {"image_size": 28, "images": 1}
    texts = [call("calculator", expression="1"), "ok", "red"]
    policy = ToolPolicy(answers(*texts))
    (one,) = play(policy, store, events, name="recall", args=recall, tools=["calculator"]).trajectories
    assert [len(turn.tool_calls) for turn in one.turns] == [1, 0, 0]
    assert [len(messages) for messages, _ in policy.requests] == [2, 4, 6]


def failing(image: Image.Image) -> str:
    """Fail.

    Args:
        image: The image.
    """
    raise ToolError(f"an image of {image.size}")


def test_image_arguments_are_numbers_of_shown_images() -> None:
    from armature.components.artifacts.images import encode_png
    from armature.components.contracts.tool_calls import ToolCall
    from armature.components.environments.tools.box import ToolBox

    images: list[EncodedImage] = [encode_png(Image.new("RGB", (size, 9))) for size in (10, 20)]
    box = ToolBox(functions=[failing])
    called = [({}, "(20, 9)"), ({"image": 0}, "(10, 9)"), ({"image": 2}, "from 0 to 1"), ({"image": -1}, "from 0 to 1")]
    for arguments, shown in called:
        assert shown in str(asyncio.run(box.call(ToolCall("failing", arguments), images)).content)
    properties = box.schemas[0]["function"]["parameters"]["properties"]
    assert properties == {"image": {"type": "integer", "description": "The image."}}
    box.close()
