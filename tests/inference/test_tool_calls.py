"""Tool calls in the formats of chat templates: 500 generated completions of each are read as written, or refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from armature.components.inference.tool_calls import ToolFormat, tool_format_of

NAMES = ("zoom", "search_page", "crop2")
TYPES = {"text": "string", "box": "array", "count": "integer", "share": "number", "flag": "boolean", "rest": "object"}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
        },
    }
    for name in NAMES
]
TEXTS = (
    "",
    "a b",
    'he said "no"',
    "it's",
    "\\n \\u0041 \\",
    "naïve 猫 🐈",
    "{[,:]}",
    "line\nbreak\n",
    "<b>&amp;</b>",
    "5",
)
PROSE = ("", "I look closer. ", 'Let me see: {"a": 1}\n', "<think>maybe zoom</think>\n\n", "2 < 3 and 猫.\n")


def value(kind: str, source: random.Random, depth: int = 0) -> Any:
    match kind:
        case "string":
            return "".join(source.choices(TEXTS, k=source.randint(1, 3)))
        case "array":
            return (
                [value(source.choice(sorted(TYPES.values())), source, depth + 1) for _ in range(source.randint(0, 3))]
                if depth < 3
                else []
            )
        case "integer":
            return source.randint(-1000, 1000)
        case "number":
            return round(source.uniform(-5, 5), 3)
        case "boolean":
            return source.random() < 0.5
    return (
        {
            f"key{n}": value(source.choice(sorted(TYPES.values())), source, depth + 1)
            for n in range(source.randint(0, 3))
        }
        if depth < 3
        else {}
    )


def a_call(source: random.Random) -> tuple[str, dict[str, Any]]:
    keys = source.sample(sorted(TYPES), source.randint(0, len(TYPES)))
    return source.choice(NAMES), {key: value(TYPES[key], source) for key in keys}


def plain(argument: Any) -> str:
    return argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any], source: random.Random) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=source.random() < 0.5)
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(name: str, arguments: dict[str, Any], source: random.Random) -> str:
    listed = "".join(f"<parameter={key}>\n{plain(each)}\n</parameter>\n" for key, each in arguments.items())
    return f"<tool_call>\n<function={name}>\n{listed}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any], source: random.Random) -> str:
    space = source.choice(["", "\n"])
    listed = "".join(
        f"<arg_key>{key}</arg_key>{space}<arg_value>{plain(each)}</arg_value>{space}" for key, each in arguments.items()
    )
    return f"<tool_call>{name}\n{listed}</tool_call>"


def gemma(name: str, arguments: dict[str, Any], source: random.Random) -> str:
    def written(each: Any) -> str:
        match each:
            case str():
                return f'<|"|>{each}<|"|>'
            case dict():
                return "{" + ",".join(f"{key}:{written(one)}" for key, one in each.items()) + "}"
            case list():
                return "[" + ",".join(map(written, each)) + "]"
        return json.dumps(each)

    return f"<|tool_call>call:{name}{written(arguments)}<tool_call|>"


FORMATS = {"hermes": hermes, "xml": xml, "glm": glm, "gemma": gemma}


@pytest.mark.parametrize("form", FORMATS)
def test_generated_calls_are_read_as_written(form: str) -> None:
    source = random.Random(form)
    for _ in range(500):
        sent = [a_call(source) for _ in range(source.randint(1, 3))]
        text = source.choice(PROSE) + "\n".join(FORMATS[form](*call, source) for call in sent)
        read = ToolFormat(name=form).calls(text, SCHEMAS)
        assert [(call.name, call.arguments, call.defect) for call in read] == [(*call, "") for call in sent], text


@pytest.mark.parametrize("form", FORMATS)
def test_calls_cut_off_anywhere_are_read_as_written_or_malformed(form: str) -> None:
    source = random.Random(form)
    for _ in range(500):
        sent = [a_call(source) for _ in range(source.randint(1, 3))]
        parts = [FORMATS[form](*call, source) for call in sent]
        text = "\n".join(parts)
        cut = source.randint(0, len(text) - 1)
        read = ToolFormat(name=form).calls(text[:cut], SCHEMAS)
        whole = sum(len("\n".join(parts[: number + 1])) <= cut for number in range(len(parts)))
        assert [(call.name, call.arguments) for call in read if not call.defect] == sent[:whole]
        begun = text[len("\n".join(parts[:whole])) : cut].strip()
        assert sum(bool(call.defect) for call in read) == (len(begun) >= len("<tool_")), begun


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "zoom", "arguments": {"box": NaN}}</tool_call>',
        '<tool_call>{"name": "zoom", "arguments": {"text": "a", "text": "b"}}</tool_call>',
        '<tool_call>{"name": "zoom", "arguments": []}</tool_call>',
        '<tool_call>{"name": "zoom", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": "zoom", "arguments": {"text": "\\ud800"}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>zoom</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_other_texts_between_the_tags_are_malformed(text: str) -> None:
    (call,) = ToolFormat().calls(text + '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>', SCHEMAS)
    assert call.defect


def test_tags_in_values_are_never_read_as_calls() -> None:
    inner = '<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>'
    text = hermes("search_page", {"text": f"</think>{inner}"}, random.Random(0))
    (call,) = ToolFormat().calls(text, SCHEMAS)
    assert call.arguments == {"text": f"</think>{inner}"}
    for form in ("xml", "glm"):
        read = ToolFormat(name=form).calls(FORMATS[form]("search_page", {"text": inner}, random.Random(0)), SCHEMAS)
        assert [bool(call.defect) for call in read] == [True]


def test_calls_in_thoughts_are_thoughts() -> None:
    thought = hermes("zoom", {}, random.Random(0))
    assert ToolFormat().calls(f"perhaps {thought}</think>red", SCHEMAS) == []


@pytest.mark.parametrize("text", ["<tool_call>\n<function=zoom>" + " " * 60_000, "<tool_call>" * 5_000 + "</think>"])
@pytest.mark.timeout(60)
def test_long_texts_take_linear_time(text: str) -> None:
    for form in FORMATS:
        ToolFormat(name=form).calls(text, SCHEMAS)


RENDERING = (
    "{% if tools %}{% for tool in tools %}MARK{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text or '<image>' }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (RENDERING.replace("MARK", "<tool_call>"), ("hermes", True, True)),
        (RENDERING.replace("MARK", "<tool_call><function=a>"), ("xml", True, True)),
        (RENDERING.replace("MARK", "<tool_call><arg_key>"), ("glm", True, True)),
        (RENDERING.replace("MARK", "<|tool_call>"), ("gemma", True, True)),
        (RENDERING.replace("MARK", "[CALLS]"), ("hermes", False, False)),  # a format without a parser
        (RENDERING.replace("MARK", "<tool_call>").replace("or '<image>'", ""), ("hermes", True, False)),
        ("{{ messages[0].content }}", ("hermes", False, False)),
        ("{{ raise_exception('no') }}", ("hermes", False, False)),
        ("", ("hermes", False, False)),
    ],
)
def test_format_follows_the_chat_template(template: str, expected: tuple[str, bool, bool]) -> None:
    form = tool_format_of(template)
    assert (form.name, form.renders_tools, form.renders_results) == expected
