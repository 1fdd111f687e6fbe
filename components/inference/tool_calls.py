"""Tool calls in the formats of chat templates: the parser of each format, and the one that a template uses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from armature.components.contracts.files import read_bytes
from armature.components.contracts.settings import Settings
from armature.components.contracts.tool_calls import ToolCall
from armature.components.models.reserved_tokens import TOKENIZER_CONFIG, added_tokens

Schemas = Sequence[Mapping[str, Any]]
THOUGHT = "</think>"
"""The end of thoughts. A call before it is a thought, too."""
LARGEST_TEMPLATE = 2**26
"""Largest file with a template that is read, in bytes."""


class Malformed(Exception):
    """A call cannot be parsed."""


Read = Callable[[str, int, Schemas], tuple[str, dict[str, Any], int]]
"""A parser of one format. It gets a text, the place after the begin tag of a call, and the tools' schemas. It returns
the name, the arguments and the place of the end tag, or raises Malformed."""

# --- Values that are JSON, or texts that the schema gives a type ---


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise Malformed("a name is repeated")
    return dict(pairs)


def _no_number(text: str) -> Any:
    raise Malformed(f"{text} is not a number of JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


def _json_at(text: str, start: int) -> tuple[Any, int]:
    try:
        value, end = _JSON.raw_decode(text, start)
        json.dumps(value).encode()  # an escape may name half a character
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON: {error}") from error
    return value, end


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _typed(name: str, values: Mapping[str, str], schemas: Schemas) -> dict[str, Any]:
    """Return arguments that are written as text: a text as it is, other types of the schema as JSON."""
    types = {each["function"]["name"]: each["function"]["parameters"].get("properties", {}) for each in schemas}
    arguments: dict[str, Any] = dict(values)
    for key, text in values.items():
        kind = types.get(name, {}).get(key, {}).get("type", "string")
        if "string" not in ([kind] if isinstance(kind, str) else kind):
            with suppress(Malformed):  # the tool's schema then refuses the text
                value, end = _json_at(text, 0)
                arguments[key] = value if end == len(text) else text
    return arguments


# --- The formats ---


def _hermes(text: str, at: int, schemas: Schemas) -> tuple[str, dict[str, Any], int]:
    value, end = _json_at(text, _after_space(text, at))
    match value:
        case {"name": str() as name, "arguments": dict() as arguments, **rest} if not rest:
            return name, arguments, _after_space(text, end)
    raise Malformed('write {"name": ..., "arguments": {...}}')


_TAG = re.compile(r"</?(?:tool_call|function|parameter|arg_key|arg_value)\b")
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*(.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_CALL = re.compile(r"\s*([^<>\s]+)\s*(.*)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _tagged(
    call: re.Pattern[str], argument: re.Pattern[str], closing: str, text: str, at: int, schemas: Schemas
) -> tuple[str, dict[str, Any], int]:
    """Parse a call whose arguments are in tags. No argument may contain a tag of the format, which would be
    ambiguous."""
    end = text.find("</tool_call>", at)
    match = call.fullmatch(text, at, max(at, end))
    rest = "" if match is None else match[2].rstrip()
    if end < 0 or match is None or not rest.endswith(closing):
        raise Malformed("it is cut off, or has no name")
    pairs, place, rest = [], 0, rest[: len(rest) - len(closing)]
    while place < len(rest):
        one = argument.match(rest, place)
        if one is None or _TAG.search(one[2]):
            raise Malformed(f"it is not an argument: {rest[place : place + 40]!r}")
        pairs.append((one[1], one[2]))
        place = one.end()
    return match[1], _typed(match[1], _unique(pairs), schemas), end


_QUOTE = '<|"|>'
_GEMMA_CALL = re.compile(r"call:([^{\s]+)(?=\{)")
_GEMMA_KEY = re.compile(r'(?:<\|"\|>(.*?)<\|"\|>|([^:{}\[\],\s"<]+)):', re.DOTALL)
_GEMMA_SCALAR = re.compile(r"[^,\]}<{\[]+")


def _gemma_at(text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """Return the value at a place of a Gemma call, and the place after it."""
    if depth > 100:
        raise Malformed("it is nested too deeply")
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise Malformed("a text does not end")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    opened = text[at : at + 1]
    if opened not in ("{", "["):
        match = _GEMMA_SCALAR.match(text, at)
        if match is None:
            raise Malformed(f"a value is missing at {text[at : at + 40]!r}")
        scalar = {"None": "null", "True": "true", "False": "false"}.get(match[0], match[0])
        value, end = _json_at(scalar, 0)
        if end != len(scalar) or isinstance(value, str):
            raise Malformed(f"{match[0]!r} is not a value")
        return value, match.end()
    items: list[Any] = []
    closing, at = {"{": "}", "[": "]"}[opened], at + 1
    while not text.startswith(closing, at):
        if items:
            if not text.startswith(",", at):
                raise Malformed(f"a comma is missing at {text[at : at + 40]!r}")
            at += 1
        key = ""
        if opened == "{":
            match = _GEMMA_KEY.match(text, at)
            if match is None:
                raise Malformed(f"a name is missing at {text[at : at + 40]!r}")
            key, at = match[1] if match[2] is None else match[2], match.end()
        value, at = _gemma_at(text, at, depth + 1)
        items.append((key, value) if opened == "{" else value)
    return (_unique(items) if opened == "{" else items), at + 1


def _gemma(text: str, at: int, schemas: Schemas) -> tuple[str, dict[str, Any], int]:
    match = _GEMMA_CALL.match(text, at)
    if match is None:
        raise Malformed("write call:NAME{...}")
    arguments, end = _gemma_at(text, match.end())
    return match[1], arguments, end


_FORMATS: dict[str, tuple[str, str, str, Read]] = {
    "glm": ("<arg_key>", "<tool_call>", "</tool_call>", partial(_tagged, _GLM_CALL, _GLM_ARGUMENT, "")),
    "xml": ("<function=", "<tool_call>", "</tool_call>", partial(_tagged, _FUNCTION, _PARAMETER, "</function>")),
    "gemma": ("<|tool_call>", "<|tool_call>", "<tool_call|>", _gemma),
    "hermes": ("<tool_call>", "<tool_call>", "</tool_call>", _hermes),
}
"""For each format the text by which a template is known to use it, the tags around a call, and the parser."""
_INSTRUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""The text by which templates of Qwen render tools. It is for models whose template renders none."""


class ToolFormat(Settings):
    """The way in which a model is shown tools and results, and writes calls.

    Example:
        >>> text = 'I look. <tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 9, 9]}}</tool_call>'
        >>> [(call.name, call.arguments) for call in ToolFormat().calls(text, [])]
        [('zoom', {'box': [0, 0, 9, 9]})]
        >>> [call.defect for call in ToolFormat().calls(text[:-1], [])]
        ['the end of the call is missing']
    """

    name: Literal["hermes", "xml", "glm", "gemma"] = "hermes"
    """Format of calls. hermes: JSON between <tool_call> tags."""
    renders_tools: bool = False
    """True if the chat template renders the schemas. Otherwise they are a part of the system prompt."""
    renders_results: bool = False
    """True if the chat template renders messages of the role tool, with images. Otherwise the user shows results."""
    reserved: tuple[str, ...] = ()
    """Special tokens of the model. A result cannot contain them."""

    def calls(self, text: str, schemas: Schemas) -> list[ToolCall]:
        """Return the calls in a completion, in order. Nothing is read after a malformed call, or in thoughts."""
        return [call for _, call in self.located(text, schemas)]

    def located(self, text: str, schemas: Schemas) -> list[tuple[int, ToolCall]]:
        """Return the calls in a completion, each with its place in the text."""
        _, begin, end, read = _FORMATS[self.name]
        calls, at, thought = list[tuple[int, ToolCall]](), 0, text.find(THOUGHT)
        while (at := text.find(begin, at)) >= 0:
            try:
                name, arguments, stop = read(text, at + len(begin), schemas)
                if not text.startswith(end, stop):
                    raise Malformed("the end of the call is missing")
                call, stop = ToolCall(name, arguments), stop + len(end)
            except Malformed as error:
                call, stop = ToolCall("", defect=str(error)), at
            if at < thought and stop <= thought:
                at = thought
                continue
            calls.append((at, call))
            if call.defect:
                return calls
            at = stop
        rest = text[text.rfind("<") :] if "<" in text else ""
        if len(rest) > len("<tool") and begin.startswith(rest) and begin != rest:
            calls.append((text.rfind("<"), ToolCall("", defect="it is cut off")))
        return calls

    def instruction(self, schemas: Schemas) -> str:
        """Return the text of the system prompt that describes the tools; empty if the chat template renders them."""
        if self.renders_tools:
            return ""
        return _INSTRUCTION.replace("{schemas}", "\n".join(json.dumps(each, ensure_ascii=False) for each in schemas))

    def shown(self, text: str) -> str:
        """Return the text of a result, with a space in special tokens, which would otherwise change the conversation.

        Example:
            >>> ToolFormat(reserved=("<|im_end|>",)).shown("red<|im_end|>")
            'red< |im_end|>'
        """
        for token in self.reserved:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


# --- The format of a model, from its chat template ---


def read_tool_format(folder: Path) -> ToolFormat:
    """Return the format of the model in the folder of a checkpoint. Files are read, and no model is loaded."""
    return tool_format_of(_template(folder), tuple(sorted({each.text for each in added_tokens(folder)})))


def tool_format_of(template: str, reserved: tuple[str, ...] = ()) -> ToolFormat:
    """Return the format of a chat template. `reserved` are the special tokens of the model.

    The template is tried on a conversation with a call. If it does not show the schemas, or if it is for a format that
    has no parser here, the schemas become a part of the system prompt, in the format of Qwen. If it does not show a
    result with an image, results are messages of the user.
    """
    name = next((name for name, (mark, *_) in _FORMATS.items() if mark in template), None)
    plain, with_image = _rendered(template, image=False), _rendered(template, image=True)
    renders_tools = name is not None and "name_of_tool" in plain
    after = plain.find("the call")
    shows = 0 <= after < plain.find("the result") and len(with_image) > len(plain)
    return ToolFormat(
        name=name if name is not None and renders_tools else "hermes",
        renders_tools=renders_tools,
        renders_results=renders_tools and shows,
        reserved=reserved,
    )


def _template(folder: Path) -> str:
    """Return the text of the chat template; empty without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_bytes(file, LARGEST_TEMPLATE).decode()
    for name in ("chat_template.json", TOKENIZER_CONFIG):
        if (folder / name).is_file():
            template = json.loads(read_bytes(folder / name, LARGEST_TEMPLATE)).get("chat_template")
            if isinstance(template, list):  # several by name, one of which is for tools
                named = {each["name"]: each["template"] for each in template}
                template = named.get("tool_use", named.get("default"))
            if template:
                return str(template)
    return ""


def _rendered(template: str, image: bool) -> str:
    """Return a conversation with a call and its result as the template renders it; empty if the template refuses.

    Templates that do not read contents in parts get texts, as they do from servers.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # the import takes a second

    parameters = {"type": "object", "properties": {}}
    schema = {"name": "name_of_tool", "description": "A tool.", "parameters": parameters}
    results = [{"type": "text", "text": "the result"}, *([{"type": "image"}] if image else [])]
    for question, result in (
        ([{"type": "text", "text": "the question"}], results),
        ("the question", "the result" + " and an image" * image),
    ):
        conversation = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "the call"},
            {"role": "tool", "content": result, "tool_call_id": "call_0", "name": "name_of_tool"},
        ]
        tools = [{"type": "function", "function": schema}]
        with suppress(Exception):  # a template may raise anything
            (text,), _ = render_jinja_template(
                [conversation], tools, chat_template=template, bos_token="", eos_token=""
            )
            if "the question" in text:
                return str(text)
    return ""
