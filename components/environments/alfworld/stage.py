"""The stage that writes games in ALFWorld's own layout, after winning each of them by its plan."""

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
    """Which games, and how many of each split."""

    games: GamesSettings = GeneratedGames(source="generated")
    """Where games come from."""
    train: NonNegativeInt
    """Games of the training split."""
    valid_seen: NonNegativeInt
    """Held-out games in scenes of the training split."""
    valid_unseen: NonNegativeInt
    """Games in scenes that are in no other split."""
    seed: NonNegativeInt = Field(0, lt=2**31)
    """Seed of the games, or of their choice from a folder."""


class AlfworldGames(Sections):
    """Games in ALFWorld's own folder layout, for environments whose games have the source folder."""

    FLOW = "armature.flows.alfworld_games.alfworld_games"

    games: GamesStageSettings
    """Which games, and how many of each split."""
    machine: MachineSection = Machine()


def write_games(
    settings: GamesStageSettings, inputs: Mapping[str, Artifact], folder: Path, context: StageContext
) -> StageReport:
    """`train`, `valid_seen` and `valid_unseen`, and `digest.txt`, which a recipe gives for `source = "folder"`."""
    counts = {"train": settings.train, "valid_seen": settings.valid_seen, "valid_unseen": settings.valid_unseen}
    if not any(counts.values()):
        raise ConfigurationError(
            "no games are requested", code="no_games_requested", where="train, valid_seen, valid_unseen"
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
    """
    Raises:
        DataError: the plan does not lead from an unmet goal to the goal by admissible commands.
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
