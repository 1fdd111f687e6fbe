"""A tool: a typed Python function, its JSON schema, and one call of it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NotRequired, get_type_hints

from PIL import Image
from pydantic import TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from armature.components.artifacts.images import decode, encode_png, to_rgb
from armature.components.contracts.errors import ConfigurationError, DataError, said
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.tool_calls import ToolResult, ToolStatus

MOST_PARTS, MOST_CHARACTERS, MOST_PIXELS = 16, 2**16, 2**24
"""Limits on a result: its texts and images, the characters of all texts, and the pixels of each image."""
MOST_ELONGATED = 100
"""Largest ratio of the sides of an image in a result. Processors refuse images that are thinner."""
SIGNATURE = (
    "write def zoom(image: Image.Image, box: list[float]) -> Image.Image, with a docstring that describes the function "
    "and each argument under Args:"
)


class ToolError(Exception):
    """An error of a tool whose message the model is shown, such as "there is no such page".

    Example:
        >>> raise ToolError("the box is empty")
        Traceback (most recent call last):
        ...
        armature.components.environments.tools.tool.ToolError: the box is empty
    """


class Tool:
    """A function that a model can call. It may be async. Its JSON schema is made of its types and its docstring.

    An argument of the type `PIL.Image.Image` is an integer in the schema: the number of an image that the model was
    shown, from 0; without it, the last one. The function gets the image.

    Raises:
        ConfigurationError: an argument has no type, or cannot be passed by name.

    Example:
        >>> def double(number: int) -> str:
        ...     '''Double a number.
        ...
        ...     Args:
        ...         number: The number.
        ...     '''
        ...     return str(2 * number)
        >>> tool = Tool(double)
        >>> tool.schema["function"]["parameters"]["properties"]
        {'number': {'type': 'integer', 'description': 'The number.'}}
        >>> run_tool(tool, {"number": 21}, {}).content
        ('42',)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, str(getattr(function, "__name__", function))
        try:
            self._hints, self._parameters = get_type_hints(function), inspect.signature(function).parameters.values()
            for each in self._parameters:
                if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                    raise TypeError(f"the argument {each.name!r} cannot be passed by name")
                if each.name not in self._hints:
                    raise TypeError(f"the argument {each.name!r} has no type")
        except Exception as error:  # a type may be any text
            raise self._without_schema(error) from error
        self.images = frozenset(each.name for each in self._parameters if self._hints[each.name] is Image.Image)
        fields = {
            each.name: self._hints[each.name] if each.default is each.empty else NotRequired[self._hints[each.name]]
            for each in self._parameters
            if each.name not in self.images
        }
        make: Any = TypedDict
        self.arguments = TypeAdapter[dict[str, Any]](with_config(extra="forbid")(make("Arguments", fields)))

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool's JSON schema, as `transformers.utils.get_json_schema` returns it.

        Raises:
            ConfigurationError: the function has no docstring, or an argument has no description.
        """
        from transformers.utils.chat_template_utils import get_json_schema  # the import takes a second

        def described() -> None: ...

        parameters = [
            each.replace(annotation=int, default=None) if each.name in self.images else each
            for each in self._parameters
        ]
        described.__name__, described.__doc__ = self.name, inspect.getdoc(self.function)
        ordered = sorted(parameters, key=lambda each: (each.kind, each.default is not each.empty))
        described.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        described.__annotations__ = {
            each.name: int if each.name in self.images else self._hints[each.name] for each in parameters
        }
        try:
            return dict(get_json_schema(described))
        except Exception as error:  # a docstring may be anything
            raise self._without_schema(error) from error

    def _without_schema(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"the tool {self.name!r} has no schema: {said(error)}",
            code="tool_schema_missing",
            where="tools",
            remedy=SIGNATURE,
        )


def run_tool(tool: Tool, arguments: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> ToolResult:
    """Call a tool in this process. `images` are its arguments that are images, by name.

    The result is never an exception: errors have a status of their own, and a text for the model.
    """
    try:
        values = tool.arguments.validate_python(dict(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        return failed("arguments", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    try:
        value = tool.function(**values, **{name: decode(image) for name, image in images.items()})
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except ToolError as error:
        return failed("error", str(error))
    except Exception as error:
        return failed("raised", said(error))
    try:
        several = isinstance(value, list | tuple) and any(isinstance(one, Image.Image) for one in value)
        parts = value if several else [value]
        if len(parts) > MOST_PARTS:
            raise DataError(f"{len(parts)} parts; at most {MOST_PARTS} are shown")
        content = tuple(_part(part) for part in parts)
        if (size := sum(len(part) for part in content if isinstance(part, str))) > MOST_CHARACTERS:
            raise DataError(f"{size} characters; at most {MOST_CHARACTERS} are shown")
    except DataError as error:
        return failed("result", error.what)
    except Exception as error:  # of an object that the function returned
        return failed("result", said(error))
    return ToolResult("ok", content)


def failed(status: ToolStatus, reason: str) -> ToolResult:
    """Return the result that shows a failed call to the model."""
    return ToolResult(status, (f"Error: {reason[:1000]}",))


async def _awaited(value: Any) -> Any:
    return await value


def _part(value: Any) -> str | EncodedImage:
    """Return a part of a result: a text, an image, or another value as JSON.

    Raises:
        DataError: it is an image that cannot be shown, or a value without JSON.
    """
    if isinstance(value, Image.Image):
        if not value.width * value.height or max(value.size) > MOST_ELONGATED * min(value.size):
            raise DataError(f"an image of {value.width} x {value.height} pixels is too thin to be shown")
        if value.width * value.height > MOST_PIXELS:
            raise DataError(f"an image of {value.width} x {value.height} pixels is too large to be shown")
        return encode_png(to_rgb(value))
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"a tool returned {type(value).__name__}, not text, images or JSON: {error}") from error
    return str(text)
