"""Games by their settings, and what they depend on besides them."""

from __future__ import annotations

from collections.abc import Iterator

from armature.components.environments.alfworld.games.folders import games_digest, read_games
from armature.components.environments.alfworld.games.game import FolderGames, Game, GeneratedGames, Source
from armature.components.environments.alfworld.games.generate import generate_games
from armature.components.project import project_path
from armature.components.sources.data import versions


def load_games(games: GeneratedGames | FolderGames, source: Source, *, count: int, seed: int) -> Iterator[Game]:
    """`count` games of the split `source`; a larger count begins with the same games.

    Of a folder's games `seed` picks an order. The kinds take turns where games are generated.

    Raises:
        ConfigurationError: there are fewer games, the digest is another, or alfworld is not installed.
        DataError: a file is not what it should be.
    """
    if isinstance(games, GeneratedGames):
        return generate_games(games, source, count=count, seed=seed)
    return read_games(games, source, count=count, seed=seed)


def games_sources(games: GeneratedGames | FolderGames) -> dict[str, str]:
    """What games depend on besides their settings; a folder that is not here is taken to be as `digest` says."""
    found = versions("alfworld", "textworld")
    if isinstance(games, FolderGames):
        folder = project_path(games.path)
        found["games"] = games_digest(folder) if folder.is_dir() else games.digest
    return found
