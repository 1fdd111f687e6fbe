"""Games of ALFWorld from a folder that somebody else made."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from armature.components.environments.alfworld.games.folders import GAME, TRAJECTORY, games_digest, write_game
from armature.components.environments.alfworld.games.game import KINDS, FolderGames, check_goal, check_problem
from armature.components.environments.alfworld.games.generate import load_games
from tests.environments.alfworld.games_of import generated
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    games = list(load_games(generated(), "train", count=2, seed=1))
    for game in games:
        write_game(game, folder / "whole")

    def attempt(rng: random.Random) -> bool:
        root = folder / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(folder / "whole", root)
        path = rng.choice(sorted([*root.rglob(GAME), *root.rglob(TRAJECTORY)]))
        if rng.random() < 0.5:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        else:
            path.write_bytes(dumps(damaged_document(json.loads(path.read_text()), rng)))
        values = {"source": "folder", "path": str(root), "digest": games_digest(root), "kinds": list(KINDS)}
        settings = FolderGames.model_validate({**values, "replaced_grammars": []})
        loaded = list(load_games(settings, "train", count=1, seed=0))
        expect(0 < len(loaded) <= len(games), f"{len(loaded)} games")
        for game in loaded:
            check_goal(game.goal, where="")
            check_problem(game.problem, where="")
            expect(game.kind in KINDS and all(isinstance(each, str) for each in game.plan), "a game of no kind")
        return True

    yield attempt
