"""Players, lent to one episode at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Condition
from typing import TYPE_CHECKING

from armature.components.environments.alfworld.thor.metadata import PlayerError

if TYPE_CHECKING:
    from armature.components.environments.alfworld.thor.player import ThorPlayer


class ThorPlayerPool:
    """At most `limit` of them; each is started when it is first needed, and kept until `close`."""

    def __init__(self, start: Callable[[], ThorPlayer], limit: int) -> None:
        self._start, self._limit = start, limit
        self._idle: list[ThorPlayer] = []
        self._lent: set[ThorPlayer] = set()
        self._places = 0  # taken, by players or by one that is being started
        self._closed = False
        self._changed = Condition()

    def take(self) -> ThorPlayer:
        """A player that is nobody else's; waits until there is one.

        Raises:
            PlayerError: the players were closed.
            ConfigurationError: a player cannot be started here.
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
        """Lend it to the next, or end it and make room for another one."""
        with self._changed:
            self._lent.discard(player)
            if usable and not self._closed:
                self._idle.append(player)
                self._changed.notify()
                return
        self._discard(player)

    def close(self) -> None:
        """End all players; who waits for one or plays with one gets a `PlayerError`."""
        with self._changed:
            self._closed = True
            idle, lent, self._idle = self._idle, list(self._lent), []
            self._changed.notify_all()
        for player in idle:
            self._discard(player)
        for player in lent:  # its pipes are closed by the thread that plays with it
            player.end()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise PlayerError("the environment was closed", code="environment_closed")

    def _discard(self, player: ThorPlayer) -> None:
        player.end()
        with suppress(Exception):  # what is left of a dead player may fail in any way
            player.stop()
        self._free()

    def _free(self) -> None:
        with self._changed:
            self._places -= 1
            self._changed.notify()
