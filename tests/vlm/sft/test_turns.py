"""Trained tokens of conversations, against what the template renders and what transformers' own mask says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.artifacts.videos import FrameSettings
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.files import FolderFiles
from armature.components.models.adapters import get_adapter
from armature.components.models.load import load_processor
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.vlm.sft.chats import chat_row
from armature.components.vlm.sft.conversations import marked_text
from armature.components.vlm.sft.settings import ConversationSettings
from armature.components.vlm.sft.turns import TurnWriter, stop_tokens
from tests.vlm.conftest import model_settings

DATA = ConversationSettings(source="chats.jsonl")
CALL = {"type": "function", "function": {"name": "zoom", "arguments": '{"box": [1, 2]}'}}
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'][0]['text'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'][0]['text'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{{ tools[0]['function']['name'] }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% for c in m.get('tool_calls', []) %}<call>{{ c['function'] | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = HERMES.replace("{{ p['text'] }}", "{{ p['text'] if loop.last and m == messages[-1] else p['text'][-1:] }}")


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def image(shade: int, side: int = 56) -> dict[str, Any]:
    return {"type": "image", "image": {"bytes": encode_png(Image.new("RGB", (side, 56), (shade, 9, 9))).data}}


class Model:
    """A tiny checkpoint's processor, and what it makes of a conversation."""

    def __init__(self, family: str, folder: Path, template: str | None = None) -> None:
        self.folder = make_tiny_checkpoint(family, folder / "model", 0)
        self.processor = load_processor(self.folder, model_settings())
        if template is not None:
            self.processor.chat_template = self.processor.tokenizer.chat_template = template
        self.images = ImageStore(folder / "images")
        self.files = FolderFiles(folder)

    def turns(self, messages: list[dict[str, Any]], **columns: Any) -> list[Any]:
        stops = stop_tokens(self.folder, self.processor.tokenizer)
        writer = TurnWriter(self.processor, stops, self.images, FrameSettings())
        return writer.turns(chat_row({"messages": messages, **columns}, DATA), self.files)

    def samples(self, messages: list[dict[str, Any]], **columns: Any) -> list[Any]:
        played = Trajectory("t", "g", "e", "t", "train", tuple(self.turns(messages, **columns)), False)
        samples, drops = get_adapter(self.folder, self.processor, self.images.open).samples(GenerateOutputs([played]))
        assert not drops
        return samples

    def trained(self, sample: Any) -> list[str]:
        return re.findall("⟦(.*?)⟧", marked_text(sample, self.processor.tokenizer), re.DOTALL)


@pytest.mark.parametrize("family", ["qwen2-vl", "gemma3", "glm4v", "internvl", "idefics3", "pixtral", "llava"])
def test_answers_and_their_stop_tokens_are_trained_in_every_template(family, tmp_path):
    model = Model(family, tmp_path)
    chat = [user(image(1), "What?"), assistant("red one"), user("And ", image(2, 84), "?"), assistant("blue")]
    (sample,) = model.samples(chat)
    stop = model.processor.tokenizer.eos_token
    assert model.trained(sample) == [f"red one{stop}", f"blue{stop}"]
    assert len(sample.images) == 2


def test_markers_give_the_mask_of_transformers(tmp_path):
    model = Model("qwen2-vl", tmp_path, MARKED)
    chat = [user("What?"), assistant("red"), user("And?"), assistant("blue")]
    (sample,) = model.samples(chat)
    parts = [{**each, "content": [{"type": "text", "text": "".join(map(str, _texts(each)))}]} for each in chat]
    made = model.processor.tokenizer.apply_chat_template(parts, return_dict=True, return_assistant_tokens_mask=True)
    until = len(sample.input_ids)
    assert sample.input_ids.tolist() == made["input_ids"][:until]
    assert sample.loss_mask.tolist() == [bool(each) for each in made["assistant_masks"][:until]]
    assert not any(made["assistant_masks"][until:])


def _texts(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def test_tool_calls_are_trained_and_tool_results_are_not(tmp_path):
    model = Model("qwen2-vl", tmp_path, HERMES)
    schema = {"type": "function", "function": {"name": "zoom", "parameters": {}}}
    result = {"role": "tool", "content": [image(3), {"type": "text", "text": "closer"}], "tool_call_id": "1"}
    chat = [user(image(1), "?"), assistant("", tool_calls=[CALL]), result, assistant("blue")]
    for tools in ([schema], json.dumps([schema])):
        (sample,) = model.samples(chat, tools=tools)
        called = '<call>{"name": "zoom", "arguments": {"box": [1, 2]}}</call><|im_end|>'
        assert model.trained(sample) == [called, "blue<|im_end|>"]
        assert marked_text(sample, model.processor.tokenizer).startswith("<|im_start|>system\nzoom<|im_end|>")
    turns = model.turns(chat, tools=[schema])
    assert [len(turn.images) for turn in turns] == [1, 2]
    assert [part["type"] for part in json.loads(turns[1].messages)[0]["content"]] == ["image", "text"]


def test_template_that_rewrites_earlier_turns_gives_a_sample_for_each_turn(tmp_path):
    model = Model("qwen2-vl", tmp_path, REWRITING)
    samples = model.samples([user("a"), assistant("long red"), user("b"), assistant("long blue")])
    assert [model.trained(sample) for sample in samples] == [["long red<|im_end|>"], ["long blue<|im_end|>"]]
    assert "assistant\nd<|im_end|>" in marked_text(samples[1], model.processor.tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param(HERMES.replace("<|im_end|>\n", "\n"), "turn_end", id="no_stop_token"),
        pytest.param(
            HERMES.replace("assistant\n{% endif", "bot\n{% endif"), "turn_border", id="answer_not_after_prompt"
        ),
        pytest.param("{{ raise_exception('only texts') }}", "template_error", id="template_raises"),
        pytest.param(MARKED.replace("== 'assistant'", "== 'nobody'") + "x", "turn_border", id="marks_nothing"),
    ],
)
def test_unsafe_template_is_refused(template, reason, tmp_path):
    model = Model("qwen2-vl", tmp_path, template)
    with pytest.raises(BadRow) as refused:
        model.turns([user("What?"), assistant("red")])
    assert refused.value.reason == reason


def test_prompt_is_the_one_that_a_server_would_see(tmp_path):
    model = Model("qwen2-vl", tmp_path)
    (turn,) = model.turns([user(image(1), "What?"), assistant("red")])
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    text = model.processor.apply_chat_template(parts, add_generation_prompt=True, tokenize=False)
    shown = Image.new("RGB", (56, 56), (1, 9, 9))
    assert np.array_equal(turn.prompt_token_ids, model.processor(text=[text], images=[[shown]])["input_ids"][0])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        pytest.param({}, "bad_conversation", id="no_messages"),
        pytest.param({"messages": "[{"}, "bad_conversation", id="not_json"),
        pytest.param({"messages": [{"role": "cat", "content": "x"}]}, "bad_conversation", id="role"),
        pytest.param({"messages": [user("x")]}, "no_answer", id="only_the_user"),
        pytest.param({"messages": [user("x"), assistant(" ")]}, "no_answer", id="empty_answer"),
        pytest.param({"messages": [user("x"), assistant("y", weight=1)]}, "bad_conversation", id="unknown_field"),
        pytest.param({"messages": [user({"type": "image"}), assistant("y")]}, "image_count", id="image_missing"),
        pytest.param({"messages": [user("x"), assistant("y", tool_calls=[{}])]}, "bad_tools", id="call_without_name"),
        pytest.param({"messages": [user("x"), assistant("y")], "tools": "zoom"}, "bad_tools", id="tools_not_json"),
        pytest.param({"messages": [user("x" * 2**19), assistant("y")]}, "too_long", id="too_long"),
        pytest.param({"messages": [user("x\ud800"), assistant("y")]}, "bad_text", id="surrogate"),
    ],
)
def test_unusable_row_has_a_reason(row, reason):
    with pytest.raises(BadRow) as refused:
        chat_row(row, DATA)
    assert refused.value.reason == reason
