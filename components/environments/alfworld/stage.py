"""The stage `alfworld-games`, which writes games in ALFWorld's folder layout after it has won each by its plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from pydantic import Field, NonNegativeInt

from armature.components.configuration.recipes import MachineSection, Sections
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.alfworld.games.folders import games_digest, write_game
from armature.components.environments.alfworld.games.game import SOURCES, Game, GamesSettings, GeneratedGames
from armature.components.environments.alfworld.games.generate import load_games
from armature.components.environments.alfworld.text.host import EngineHost
from armature.components.machine.workers.worker import Worker


class GamesStageSettings(Settings):
    """Settings of the stage: the source of the games and their number in each split."""

    games: GamesSettings = GeneratedGames(source="generated")
    """Source of the games."""
    train: NonNegativeInt
    """Number of games in the training split."""
    valid_seen: NonNegativeInt
    """Number of held-out games in scenes of the training split."""
    valid_unseen: NonNegativeInt
    """Number of held-out games in scenes that are in no other split."""
    seed: NonNegativeInt = Field(0, lt=2**31)
    """Seed for generating games, or for choosing them from a folder."""


class AlfworldGames(Sections):
    """The recipe that writes games in ALFWorld's folder layout, for environments whose games have the source folder."""

    FLOW = "armature.flows.alfworld_games.alfworld_games"

    games: GamesStageSettings
    """Settings of the stage that writes the games."""
    machine: MachineSection = Machine()


def write_games(
    settings: GamesStageSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """Write the folders `train`, `valid_seen` and `valid_unseen`, and `digest.txt`.

    The digest is the value of `digest` in the settings of games with the source `folder`.
    """
    counts = {"train": settings.train, "valid_seen": settings.valid_seen, "valid_unseen": settings.valid_unseen}
    if not any(counts.values()):
        raise ConfigurationError(
            "no games are requested",
            code="no_games_requested",
            where="train, valid_seen, valid_unseen",
            remedy="set at least one of them above 0",
        )
    with EngineHost(context.machine.playing_processes) as host:
        for number, source in enumerate(SOURCES):
            games = list(load_games(settings.games, source, count=counts[source], seed=settings.seed))
            host.run(games, partial(win_by_plan, host), lambda game: game.name, lambda _: None)
            for game in games:
                write_game(game, folder)
            context.events.progress("splits", number + 1, len(SOURCES))
    (folder / "digest.txt").write_text(games_digest(folder) + "\n")
    return StageReport(rows=counts)


GAMES_STAGE = Stage("alfworld-games", 1, GamesStageSettings, (), write_games)


def win_by_plan(host: EngineHost, worker: Worker, game: Game) -> None:
    """Play a game by its plan and check that it wins.

    Raises:
        DataError: the goal is met at the start, a command of the plan is not admissible, or the plan does not win.
    """
    hosted = host.play_at(worker, game.problem, game.goal)
    try:
        shown = hosted.reset()
        if shown.won:
            raise _defect(game, "the goal is met before the game begins")
        for step, command in enumerate(game.plan, 1):
            if command not in shown.commands:
                raise _defect(game, f"command {step} of the plan, {command!r}, is not admissible")
            shown = hosted.step(command)
        if not shown.won:
            raise _defect(game, f"the plan of {len(game.plan)} commands does not win")
    finally:
        hosted.close()


def _defect(game: Game, what: str) -> DataError:
    return DataError(what, code="game_not_won", where=f"{game.source}/{game.name}", remedy="leave the game out")
