"""Calls of a worker whose answers may have any form."""

from __future__ import annotations

from typing import Any

from armature.components.machine.workers.requests import ANYTHING
from armature.components.machine.workers.worker import Worker


def call(worker: Worker, method: str, *arguments: Any) -> Any:
    return worker.call(method, *arguments, reply=ANYTHING)


def parts(worker: Worker, method: str, *arguments: Any, most: int) -> list[Any]:
    yielded, _ = worker.stream(method, *arguments, part=ANYTHING, most_parts=most, reply=ANYTHING)
    return yielded
