"""`ToolBox`: the tools of an environment, which run in processes with limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import PlainValidator, StrictStr, TypeAdapter

from armature.components.artifacts.sources import code_digest
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.tool_calls import ToolCall, ToolResult, ToolStatus
from armature.components.environments.tools import TOOLS
from armature.components.environments.tools.tool import Tool, failed, run_tool
from armature.components.machine.project import VARIABLE as PROJECT
from armature.components.machine.project import project_folder
from armature.components.machine.workers.channel import IdleWorkerLost, WorkerError
from armature.components.machine.workers.queue import WorkerQueue
from armature.components.machine.workers.requests import NOTHING, ReplyForm, array_of
from armature.components.machine.workers.worker import Worker, make_worker

WORKER = "armature.components.environments.tools.worker"
START_SECONDS = 120.0
"""Seconds that a process of the tools may take to start and to import their modules."""
MOST_BYTES = 2**27
"""Largest reply of a process to one call, in bytes."""


class ToolReply(ReplyForm):
    """The reply of a process to a call. Images are PNG files as arrays of bytes."""

    status: ToolStatus
    content: list[StrictStr | Annotated[Any, PlainValidator(array_of(np.uint8, 1))]]


REPLY = TypeAdapter(ToolReply)


class ToolBox:
    """Tools by name, which run in up to `processes` processes, and functions of this program, which run in threads.

    Every call has `timeout` seconds. The process of a call that hangs, dies, or takes too much memory is ended, the
    model is shown an error, and the next call gets a new process. Python cannot end a thread: a function of this
    program that hangs goes on, and its result is dropped.

    Args:
        names: registered names (zoom, crop, rotate, calculator, python) or MODULE:FUNCTION.
        functions: functions of this program.
        max_calls: number of calls of an episode.
        timeout: seconds that one call may take.
        processes: number of processes.

    Raises:
        ConfigurationError: a tool cannot be loaded or has no schema, or two have one name.

    Example:
        >>> box = ToolBox(["calculator"])
        >>> asyncio.run(box.call(ToolCall("calculator", {"expression": "6 * 7"}), [])).content
        ('42',)
        >>> box.close()
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        functions: Sequence[Callable[..., Any]] = (),
        *,
        max_calls: int = 4,
        timeout: float = 30.0,
        processes: int = 1,
    ) -> None:
        named, here = [Tool(TOOLS[name]) for name in names], [Tool(function) for function in functions]
        name, times = Counter(tool.name for tool in [*named, *here]).most_common(1)[0]
        if times > 1:
            raise ConfigurationError(
                f"{times} tools are called {name!r}", code="tool_repeated", where="tools", remedy="rename one of them"
            )
        self._tools = {tool.name: tool for tool in [*named, *here]}
        self._here = {tool.name for tool in here}
        self.schemas: Sequence[Mapping[str, Any]] = [tool.schema for tool in self._tools.values()]
        self.max_calls, self._timeout = max_calls, timeout
        env = {PROJECT: str(project_folder().resolve())}
        workers = [
            make_worker(WORKER, {"tools": list(names)}, timeout=timeout, env=env, most_bytes=MOST_BYTES)
            for _ in range(processes if names else 0)
        ]
        self._queue = WorkerQueue(workers, "tools", WorkerError("the tools are closed", code="tools_closed"))
        self.close = self._queue.close

    async def call(self, call: ToolCall, images: Sequence[EncodedImage]) -> ToolResult:
        """Run a call and return its result; see `Tools.call`."""
        if call.defect:
            return failed("malformed", f"the call cannot be parsed: {call.defect}")
        tool = self._tools.get(call.name)
        if tool is None:
            return failed("unknown", f"there is no tool {call.name[:80]!r}; there are {', '.join(self._tools)}")
        arguments, shown = dict(call.arguments), dict[str, EncodedImage]()
        for name in tool.images:
            number = arguments.pop(name, None)
            number = len(images) - 1 if number is None else number
            if type(number) is not int or not 0 <= number < len(images):
                there = f"images are numbered from 0 to {len(images) - 1}" if images else "no image was shown"
                return failed("arguments", f"{name}: {number!r:.40} is not the number of an image; {there}")
            shown[name] = images[number]
        if tool.name in self._here:
            return await self._in_thread(tool, arguments, shown)
        sent = {name: [np.frombuffer(each.data, np.uint8), each.media_type] for name, each in shown.items()}
        called = self._queue.submit(lambda worker: self._ask(worker, tool.name, arguments, sent))
        return await asyncio.wrap_future(called)

    async def _in_thread(self, tool: Tool, arguments: dict[str, Any], images: dict[str, EncodedImage]) -> ToolResult:
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.to_thread(run_tool, tool, arguments, images)
        except TimeoutError:
            return failed("timeout", f"no result within {self._timeout:g} s")

    def _ask(self, worker: Worker, name: str, arguments: dict[str, Any], images: dict[str, Any]) -> ToolResult:
        ask = partial(worker.call, "call", name, arguments, images, reply=REPLY, timeout=self._timeout)
        try:
            try:
                _begin(worker)
                reply = ask()
            except IdleWorkerLost:  # an earlier call killed the process: this one gets a new one
                _begin(worker)
                reply = ask()
        except WorkerError as error:
            if isinstance(error.__cause__, TimeoutError):
                return failed("timeout", f"no result within {self._timeout:g} s")
            return failed("died", "the tool's process ended")
        content = (one if isinstance(one, str) else EncodedImage(one.tobytes(), "image/png") for one in reply.content)
        return ToolResult(reply.status, tuple(content))


def _begin(worker: Worker) -> None:
    if not worker.alive:
        worker.call("begin", reply=NOTHING, timeout=START_SECONDS)


def tool_sources(names: Sequence[str]) -> dict[str, str]:
    """Return the digests of the code of tools, by "tool NAME"."""
    return {f"tool {name}": code_digest(TOOLS[name].__module__) for name in names}
