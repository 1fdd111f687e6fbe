"""ALFWorld's text games: steps, resets and memory against alfworld's own environment, on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.folders import GAME, write_game
from armature.components.environments.alfworld.games.game import KINDS, Game, GeneratedGames
from armature.components.environments.alfworld.games.generate import load_games
from armature.components.environments.alfworld.text.host import EngineHost
from armature.components.machine.workers.requests import ANYTHING
from benchmarks.table import Row

GAMES, GROUP, STEPS = 6, 8, 20

_SIDE = """
import glob, json, os, random, resource, sys, time
import textworld
from textworld.envs import PddlEnv
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

root, steps = sys.argv[1], int(sys.argv[2])
base = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
environment = AlfredInfos(AlfredDemangler(base, shuffle=False))
resets = stepping = 0.0
said = {}
for path in sorted(glob.glob(root + "/train/*/*/game.tw-pddl")):
    rng, began = random.Random(0), time.process_time()
    environment.load(path)
    state = environment.reset()
    resets += time.process_time() - began
    heard = said[os.path.relpath(os.path.dirname(path), root + "/train")] = [state["feedback"]]
    for _ in range(steps):
        command = rng.choice(state["admissible_commands"])
        began = time.process_time()
        state, _, _ = environment.step(command)
        stepping += time.process_time() - began
        heard.append(state["feedback"])
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"resets": resets, "steps": stepping, "said": said, "resident": resident}))
"""


def games_of() -> list[Game]:
    """Return one game of each task type. Its rooms have as many pieces of furniture and objects as the settings
    allow."""
    settings = GeneratedGames(
        source="generated",
        kinds=KINDS,
        rooms=("Kitchen", "LivingRoom", "Bedroom", "Bathroom"),
        density=0.8,
        most_instances=3,
        most_receptacles=40,
    )
    return list(load_games(settings, "train", count=GAMES, seed=0))


def measure() -> list[Row]:
    games = games_of()
    with tempfile.TemporaryDirectory() as scratch:
        for game in games:
            write_game(game, Path(scratch))
        assert len(list(Path(scratch).glob(f"train/*/*/{GAME}"))) == GAMES
        stock = _stock(Path(scratch))
    ours = _ours(games)
    assert all(ours["said"][game.name] == stock["said"][game.name] for game in games), "not the same games"
    played, steps = GAMES * GROUP, GAMES * GROUP * STEPS
    shape = f"{GAMES} games as large as ALFWorld's, groups of {GROUP}, {STEPS} random steps, the same texts"
    return [
        Row(
            "steps", steps / ours["steps"], GAMES * STEPS / stock["steps"], "alfworld", "/s of a core", "higher", shape
        ),
        Row("reset", 1e3 * ours["resets"] / played, 1e3 * stock["resets"] / GAMES, "alfworld", "ms of a core", "lower"),
        Row(
            "memory per game",
            (ours["resident"] - ours["idle"]) / played / 2**20,
            stock["resident"] / 2**20,
            "a process per game",
            "MiB",
            "lower",
            f"besides {ours['idle'] / 2**20:.0f} MiB of the process that plays them all",
        ),
    ]


def _ours(games: list[Game]) -> dict[str, Any]:
    """Play the games with our engine. Times are CPU seconds of the worker and of this process together, so they include
    the communication between the two."""
    host = EngineHost(1)
    (worker,) = host.workers

    def spent() -> float:
        return float(worker.call("count", reply=ANYTHING)["cpu"]) + time.process_time()

    members = [(host.play(game.name, game.problem, game.goal), game) for game in games for _ in range(GROUP)]
    idle, began = worker.call("count", reply=ANYTHING)["resident"], spent()
    shown = [hosted.reset() for hosted, _ in members]
    reset = spent()
    output = {game.name: [first.feedback] for (_, game), first in zip(members, shown, strict=True)}
    choices = [Random(0) for _ in members]
    for _ in range(STEPS):
        commands = [rng.choice(now.commands) for rng, now in zip(choices, shown, strict=True)]
        shown = [hosted.step(command) for (hosted, _), command in zip(members, commands, strict=True)]
        for index in range(0, len(members), GROUP):
            output[members[index][1].name].append(shown[index].feedback)
    stepping = spent()
    resident = worker.call("count", reply=ANYTHING)["resident"]
    host.close()
    return {"resets": reset - began, "steps": stepping - reset, "said": output, "idle": idle, "resident": resident}


def _stock(root: Path) -> dict[str, Any]:
    environment = {**os.environ, "ALFWORLD_DATA": str(packaged.folder()), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", _SIDE, str(root), str(STEPS)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result
