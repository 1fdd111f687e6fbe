"""A process that plays many games: requests on stdin, answers on stdout, one JSON document per line each.

A request is {"id", "do", ...}; its answer has the same id, and either what was asked for or "error". The process
ends when stdin does, or when its parent has gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.environments.alfworld.text.engine import GameEngine

LONGEST_REQUEST = 16 * 2**20
_PARENT_CHECK = 2.0  # seconds


class GameWorker:
    """The games in progress by their number; engines whose game is over play the next one."""

    def __init__(self) -> None:
        self._playing: dict[int, GameEngine] = {}
        self._free: list[GameEngine] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "reset":
                self._end(request["game"])
                engine = self._playing[request["game"]] = self._engine()
                return _shown(engine.play(request["problem"], request["goal"]))
            case "step":
                return _shown(self._playing[request["game"]].step(request["command"])[0])
            case "close":
                self._end(request["game"])
                return {}
            case "count":
                with Path("/proc/self/statm").open() as file:
                    resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                return {"games": len(self._playing), "resident": resident, "cpu": sum(os.times()[:2])}
        raise ValueError(f"no request is called {request['do']!r}")

    def _engine(self) -> GameEngine:
        from components.environments.alfworld.text.engine import GameEngine

        return self._free.pop() if self._free else GameEngine()

    def _end(self, game: int) -> None:
        if engine := self._playing.pop(game, None):
            self._free.append(engine)


def _shown(state: Any) -> dict[str, Any]:
    return {"feedback": state["feedback"], "commands": state["admissible_commands"], "won": bool(state["won"])}


def _requests(parent: int) -> Iterator[dict[str, Any]]:
    """Until stdin ends. A process that our parent forked may hold stdin open, so the parent is looked at as well."""
    buffer = bytearray()
    while True:
        ready, _, _ = select.select([0], [], [], _PARENT_CHECK)
        if not ready:
            if os.getppid() != parent:
                return
            continue
        received = os.read(0, 2**20)
        if not received:
            return
        buffer += received
        *lines, rest = buffer.split(b"\n")
        buffer = rest
        if len(buffer) > LONGEST_REQUEST:
            return
        yield from map(json.loads, lines)


def main() -> None:
    # Answers have the real stdout to themselves; whatever the engine prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which decides
    from components.environments.alfworld.text import engine

    with tempfile.TemporaryDirectory(prefix="alfworld-") as scratch:
        engine.load_slim_library(Path(scratch))
        worker = GameWorker()
        for request in _requests(int(sys.argv[1])):
            try:
                answer = worker.answer(request)
            except BaseException as error:  # the translator ends the process over a problem that it cannot read
                answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
            answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
