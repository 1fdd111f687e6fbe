"""The process in which tools run, started as `python -m armature.components.environments.tools.worker`."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from armature.components.contracts.images import EncodedImage
from armature.components.environments.tools import TOOLS
from armature.components.environments.tools.tool import Tool, run_tool
from armature.components.machine.workers.channel import serve

MOST_MEMORY = 2**31
"""Bytes of memory that the calls of a process may add to what it has after it has imported the tools."""


class ToolHandler:
    """Answers the requests of a `ToolBox`. The tools are loaded when the process starts."""

    def __init__(self, tools: Sequence[str]) -> None:
        made = [Tool(TOOLS[name]) for name in tools]
        self._tools = {tool.name: tool for tool in made}
        self._process = psutil.Process()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self._process.memory_info().vms + MOST_MEMORY, hard))

    def begin(self) -> None:
        """Do nothing: the process has started."""

    def call(self, name: str, arguments: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
        """Run a call. `images` are files of images as arrays of bytes, and so are images in the result."""
        shown = {key: EncodedImage(each.tobytes(), kind) for key, (each, kind) in images.items()}
        try:
            result = run_tool(self._tools[name], arguments, shown)
        finally:
            for child in (left := self._process.children(recursive=True)):
                child.kill()
            psutil.wait_procs(left, timeout=1.0)
        content = [one if isinstance(one, str) else np.frombuffer(one.data, np.uint8) for one in result.content]
        return {"status": result.status, "content": content}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(ToolHandler)
