"""A pool of AI2-THOR players, each used by one episode at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Condition
from typing import TYPE_CHECKING

from armature.components.environments.alfworld.thor.metadata import PlayerError

if TYPE_CHECKING:
    from armature.components.environments.alfworld.thor.player import ThorPlayer


class ThorPlayerPool:
    """A pool of at most `limit` players. Each starts when it is first needed and runs until `close`."""

    def __init__(self, start: Callable[[], ThorPlayer], limit: int) -> None:
        self._start, self._limit = start, limit
        self._idle: list[ThorPlayer] = []
        self._lent: set[ThorPlayer] = set()
        self._places = 0  # number of players that run or are being started
        self._closed = False
        self._changed = Condition()

    def take(self) -> ThorPlayer:
        """Wait for a free player and return it for exclusive use.

        Raises:
            PlayerError: the pool was closed.
            ConfigurationError: a player cannot be started on this machine.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._idle or self._places < self._limit)
            self._refuse_when_closed()
            if self._idle:
                player = self._idle.pop()
                self._lent.add(player)
                return player
            self._places += 1
        try:
            player = self._start()
        except BaseException:
            self._free()
            raise
        with self._changed:
            if not self._closed:
                self._lent.add(player)
                return player
        self._discard(player)
        raise PlayerError("the environment was closed", code="environment_closed")

    def give_back(self, player: ThorPlayer, usable: bool) -> None:
        """Return a player to the pool. One that is not usable is ended, which makes room for a new one."""
        with self._changed:
            self._lent.discard(player)
            if usable and not self._closed:
                self._idle.append(player)
                self._changed.notify()
                return
        self._discard(player)

    def close(self) -> None:
        """End all players. Episodes that use or wait for a player get a `PlayerError`."""
        with self._changed:
            self._closed = True
            idle, lent, self._idle = self._idle, list(self._lent), []
            self._changed.notify_all()
        for player in idle:
            self._discard(player)
        for player in lent:  # the thread that uses it closes its pipes
            player.end()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise PlayerError("the environment was closed", code="environment_closed")

    def _discard(self, player: ThorPlayer) -> None:
        player.end()
        with suppress(Exception):  # a dead player may fail in any way
            player.stop()
        self._free()

    def _free(self) -> None:
        with self._changed:
            self._places -= 1
            self._changed.notify()
