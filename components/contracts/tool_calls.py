"""Tools of an environment: calls that a policy writes, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from armature.components.contracts.images import EncodedImage

ToolStatus = Literal[
    "ok", "error", "malformed", "unknown", "arguments", "raised", "result", "timeout", "died", "no_calls_left",
    "program"
]  # fmt: skip
"""The end of a call.

ok: the tool returned. error: it raised a ToolError. malformed: the call cannot be parsed. unknown: no tool has that
name. arguments: they do not fit the schema. raised: the tool raised another exception. result: it returned something
that cannot be shown. timeout, died: its process was ended, or ended by itself. no_calls_left: the turn had more calls
than the episode has left. program: an agent program got the call, and only it knows the result.
"""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a completion. `defect` says why it cannot be parsed; it is empty for a call that can be.

    Example:
        >>> ToolCall("zoom", {"box": [0, 0, 10, 10]}).defect
        ''
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    defect: str = ""


@dataclass(frozen=True)
class ToolResult:
    """The text and images that the policy is shown as the result of a call."""

    status: ToolStatus
    content: tuple[str | EncodedImage, ...]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The name and the end of a call in a recorded turn."""

    name: str
    status: str


class Tools(Protocol):
    """The tools that an environment offers in its attribute `tools`. Safe to share between threads and event loops.

    Attributes:
        schemas: a JSON schema for each tool, in the form of `transformers.utils.get_json_schema`.
        max_calls: number of calls of an episode; malformed calls count, too.
    """

    schemas: Sequence[Mapping[str, Any]]
    max_calls: int

    async def call(self, call: ToolCall, images: Sequence[EncodedImage]) -> ToolResult:
        """Run a call and return its result. `images` are all images that the policy was shown so far, in order."""

    def close(self) -> None:
        """Stop everything that the tools have started."""
