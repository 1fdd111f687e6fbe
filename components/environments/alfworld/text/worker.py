"""The worker process that plays text games for many episodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armature.components.machine.workers.channel import WorkerError, serve

if TYPE_CHECKING:
    from armature.components.environments.alfworld.text.engine import GameEngine


class GameWorker:
    """The games in progress by their number. An engine whose game has ended is used again for the next one."""

    def __init__(self) -> None:
        from armature.components.environments.alfworld.text import engine

        self._scratch = tempfile.TemporaryDirectory(prefix="alfworld-")
        engine.load_slim_library(Path(self._scratch.name))
        self._new = engine.GameEngine
        self._playing: dict[int, GameEngine] = {}
        self._free: list[GameEngine] = []

    def reset(self, game: int, problem: str, goal: str) -> dict[str, Any]:
        self.end(game)
        engine = self._playing[game] = self._free.pop() if self._free else self._new()
        return _reply(lambda: engine.play(problem, goal))

    def step(self, game: int, command: str) -> dict[str, Any]:
        engine = self._playing.get(game)
        if engine is None:
            raise WorkerError(
                "the game is not in progress in this process", code="game_lost", remedy="call reset first"
            )
        return _reply(lambda: engine.step(command)[0])

    def end(self, game: int) -> None:
        if engine := self._playing.pop(game, None):
            self._free.append(engine)

    def close(self) -> None:
        self._scratch.cleanup()

    def count(self) -> dict[str, float]:
        """Return the number of games in progress, the resident bytes and the processor seconds of this process."""
        with Path("/proc/self/statm").open() as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"games": len(self._playing), "resident": resident, "cpu": sum(os.times()[:2])}


def _reply(play: Callable[[], Any]) -> dict[str, Any]:
    try:
        state = play()
    except BaseException as error:  # the translator raises SystemExit for a problem that it cannot read
        raise WorkerError(
            f"the text engine failed: {type(error).__name__}: {error}"[:2000], code="game_engine_failed"
        ) from error
    return {"feedback": state["feedback"], "commands": state["admissible_commands"], "won": bool(state["won"])}


if __name__ == "__main__":
    serve(GameWorker)
