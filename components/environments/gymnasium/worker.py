"""The process in which Gymnasium environments play, started as `python -m
armature.components.environments.gymnasium.worker`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np

from armature.components.contracts.errors import ConfigurationError, said
from armature.components.environments.gymnasium.game import GameTurn, GymnasiumGame, make_env
from armature.components.environments.gymnasium.settings import GymnasiumSettings
from armature.components.machine.project import load_module, load_object
from armature.components.machine.workers.channel import serve

PROBED_TURNS = 12
"""Turns of random actions that a probe plays."""


class GymnasiumHandler:
    """The games in progress by their number. An environment whose game has ended plays the next one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = GymnasiumSettings.model_validate(settings)
        for module in self._settings.modules:
            try:
                load_module(module)
            except ConfigurationError:
                raise
            except (Exception, SystemExit) as error:
                raise ConfigurationError(
                    f"the module {module!r} cannot be imported: {said(error)}",
                    code="environment_module_failed",
                    where="environment.args.modules",
                    remedy="install the package that has it, or write it beside the recipe",
                ) from error
        if self._settings.expert:
            load_object(self._settings.expert, "the expert")
        self._playing: dict[int, GymnasiumGame] = {}
        self._free: list[Any] = []

    def begin(self) -> None:
        """Do nothing: the process has started."""

    def play(self, number: int, seed: int, make: Mapping[str, Any], answers: Sequence[str]) -> dict[str, Any]:
        """Play the last of the answers and return the turn; without answers, return the start.

        A game that is not in progress here, because its process was lost, is played again from its start.
        """
        turn = self._play(number, seed, make, answers)
        content = [one if isinstance(one, str) else np.frombuffer(one.data, np.uint8) for one in turn.content]
        return {**vars(turn), "content": content}

    def end(self, number: int) -> None:
        """Forget a game. Its environment plays the next one, unless `make` differs from task to task."""
        if game := self._playing.pop(number, None):
            self._free.append(game.env)

    def demonstrate(self, seed: int, make: Mapping[str, Any]) -> list[str]:
        """Return the expert's answers in the game of a task."""
        game = self._new(make)
        answers = game.demonstrate(seed)
        self._free.append(game.env)
        return answers

    def probe(self, tasks: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Play two tasks and check that the first one repeats, also beside the second and in a used environment.

        Raises:
            ConfigurationError: it does not repeat, or both tasks begin alike.
            WorkerError: the environment failed.
        """
        first = list(self._game(0, *tasks[0]))
        other, again = self._game(1, *tasks[1]), self._game(2, *tasks[0])
        begins = next(other)
        for turn, before in enumerate(first):
            if next(again) != before:
                raise ConfigurationError(
                    f"two games of {self._settings.id!r} with one seed and the same actions differ "
                    f"{f'after {turn} actions' if turn else 'at the start'}",
                    code="environment_not_repeatable",
                    where="environment.args",
                    remedy="rollouts of a group have to begin alike: use a version or a wrapper that takes all chance "
                    "from the seed of reset, and no clock",
                )
            next(other, None)
        if begins == first[0] and not self._settings.same_start:
            raise ConfigurationError(
                f"{self._settings.id!r} begins alike for two seeds: held-out tasks would be training tasks",
                code="seed_without_effect",
                where="environment.args.make",
                remedy='let the seed make the start, such as a map in make that is made from "{seed}", or set '
                "same_start = true",
            )

    def close(self) -> None:
        self._close([*self._free, *(game.env for game in self._playing.values())])

    @staticmethod
    def _close(envs: Sequence[Any]) -> None:
        for env in envs:
            with suppress(Exception):  # its games are over: an error in close costs the next game nothing
                env.close()

    def _play(self, number: int, seed: int, make: Mapping[str, Any], answers: Sequence[str]) -> GameTurn:
        game = self._playing.pop(number, None)
        left = list(answers[-1:])
        if game is None or game.turns != len(answers) - 1:
            game, left = self._new(make), list(answers)
            turn = game.reset(seed)
        for answer in left:
            turn = game.step(answer)
        self._playing[number] = game  # only now: an environment that has raised an error plays no further
        return turn

    def _new(self, make: Mapping[str, Any]) -> GymnasiumGame:
        if make != self._settings.make:
            self._close(self._free)
            self._free.clear()
        return GymnasiumGame(self._free.pop() if self._free else make_env(self._settings, make), self._settings)

    def _game(self, number: int, seed: int, make: Mapping[str, Any]) -> Iterator[GameTurn]:
        """Yield the turns of a game of random actions, which depend on its seed."""
        answers: list[str] = []
        chance = Random(seed)
        while True:
            turn = self._play(number, seed, make, answers)
            yield turn
            if turn.ended or len(answers) == PROBED_TURNS:
                return self.end(number)
            space = self._playing[number].env.action_space
            space.seed(len(answers))
            answers.append(chance.choice(turn.admissible) if turn.admissible else str(space.sample()))


if __name__ == "__main__":
    serve(GymnasiumHandler)
