"""The text engine compared with alfworld's own environment, and worker processes that are shared or die."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from armature.components.configuration.stages import run_stage
from armature.components.environments.alfworld.games.folders import games_digest, write_game
from armature.components.environments.alfworld.games.game import SOURCES, Game
from armature.components.environments.alfworld.games.generate import load_games
from armature.components.environments.alfworld.stage import GamesStageSettings
from armature.components.environments.alfworld.text.host import EngineHost, shared_host
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.machine.workers.process import WorkerProcess
from armature.components.machine.workers.requests import ANYTHING
from tests.builders import make_machine
from tests.refusals import refused

from ..games_of import GAMES, TEXT, generated

HERE = Path(__file__).parent
SMALL = {**GAMES, "density": 0.15, "most_receptacles": 3}
"""Settings of tiny games, because alfworld's own environment takes seconds for a game of the usual size."""


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost(1)
    yield host
    host.close()


def games(count: int, seed: int = 0) -> list[Game]:
    return list(load_games(generated(), "train", count=count, seed=seed))


def turns_of(host: EngineHost, game: Game, commands: list[str]) -> list[list[Any]]:
    """Play a game and return (command, text, admissible commands, won) of each turn."""
    hosted = host.play(game.name, game.problem, game.goal)
    replies = [hosted.reset(), *map(hosted.step, commands)]
    hosted.close()
    pairs = zip(["", *commands], replies, strict=True)
    return [[command, reply.feedback, list(reply.commands), reply.won] for command, reply in pairs]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = GamesStageSettings.model_validate(
        {"games": SMALL, "train": 6, "valid_seen": 6, "valid_unseen": 6, "seed": 4}  # one of each kind
    )
    machine = make_machine(store=tmp_path_factory.mktemp("store"), workers__environments=1)
    return run_stage("alfworld-games", settings, {}, machine).path


def test_engine_matches_alfworlds_own_environment(exported: Path, host: EngineHost) -> None:
    environment = {**os.environ, "ALFWORLD_DATA": str(exported), "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(HERE / "original.py"), str(exported), *SOURCES]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    original = json.loads(output.splitlines()[-1])["games"]
    assert len(original) == 18
    assert all(turns[-1][3] is True and not turns[0][3] for turns in original.values())
    ours = {f"{g.source}/{g.name}": g for s in SOURCES for g in load_games(generated(**SMALL), s, count=6, seed=4)}
    assert set(ours) == set(original)
    for name, turns in original.items():
        for _ in range(2):  # the second time with results from the caches
            assert turns_of(host, ours[name], [turn[0] for turn in turns[1:]]) == turns


def test_one_process_plays_200_independent_games_in_bounded_memory(host: EngineHost) -> None:
    few = games(10)
    playing = [(host.play(game.name, game.problem, game.goal), game) for game in few * 20]
    for hosted, _ in playing:
        hosted.reset()
    won: dict[int, bool] = {}
    for step in range(max(len(game.plan) for game in few)):
        for number, (hosted, game) in enumerate(playing):
            if step < len(game.plan):
                won[number] = hosted.step(game.plan[step]).won
    (worker,) = host.workers
    count = worker.call("count", reply=ANYTHING)
    for hosted, _ in playing:
        hosted.close()
    assert all(won.values()) and len(won) == count["games"] == 200
    assert count["resident"] < 1.5 * 2**30
    assert worker.call("count", reply=ANYTHING)["games"] == 0


def test_random_commands_rarely_win(host: EngineHost) -> None:
    """Games must not be won by any commands. In games this small, a few are won by chance."""
    random_ = random.Random(0)

    def wins(game: Game) -> bool:
        hosted = host.play(game.name, game.problem, game.goal)
        shown = hosted.reset()
        for _ in range(10):
            shown = hosted.step(random_.choice(shown.commands))
        return shown.won

    assert sum(wins(game) for game in games(24, seed=3)) <= 2


def test_games_of_equal_name_share_a_process() -> None:
    host = EngineHost(3)
    few = games(6)
    homes = [[host.workers.index(host.play(game.name, "", "")._worker) for game in few] for _ in range(8)]
    assert all(row == [0, 1, 2, 0, 1, 2] for row in homes)
    assert running(host) == []  # started by the first reset


def running(host: EngineHost) -> list[int]:
    return [worker.pid for worker in host.workers if isinstance(worker, WorkerProcess) and worker.pid is not None]


def test_open_environments_share_processes_until_the_last_user_ends() -> None:
    settings = EnvironmentSettings(name="alfworld/text", args=TEXT, train_tasks=1, heldout_tasks=1, seed=0)
    one, other = make_environment(settings, 7), make_environment(settings, 7)
    (task,) = one.tasks("train")
    episode = one.episode(task)
    asyncio.run(episode.reset())
    host = shared_host(7)
    assert shared_host(8) is not host
    (pid,) = running(host)
    del host
    one.close()
    one.close()
    assert psutil.pid_exists(pid)
    del other
    assert psutil.pid_exists(pid)  # the episode still uses it
    del episode
    assert not psutil.pid_exists(pid)


def test_unreadable_problem_fails_only_its_game(host: EngineHost) -> None:
    (game,) = games(1)
    for problem in ("", "(define", game.problem.replace("(atLocation agent1", "(nowhere agent1")):
        with refused("game_engine_failed"):
            host.play("bad", problem, game.goal).reset()
    assert host.play(game.name, game.problem, game.goal).reset().commands


def test_goal_sentence_is_never_executed(host: EngineHost, tmp_path: Path) -> None:
    """`check_goal` refuses such a sentence; here it goes to the engine without that check."""
    canary, (game,) = tmp_path / "canary", games(1)
    goal = f"{{open('{canary}', 'w')}} #look.feedback# [{{o.name | holds(a:agent, o:object)}}]"

    feedback = host.play("hostile", game.problem, goal).reset().feedback
    assert feedback.endswith(f"Your task is to: {goal}.")
    assert not canary.exists()


def test_host_can_be_garbage_collected_while_busy() -> None:
    """The garbage collector may run in any thread and collect the host there."""
    host = EngineHost(1)
    (worker,) = host.workers
    worker.call("count", reply=ANYTHING)
    (pid,) = running(host)
    users = [host]
    del host

    def forget_meanwhile() -> None:
        with worker._lock:
            users.clear()

    busy = threading.Thread(target=forget_meanwhile, daemon=True)
    busy.start()
    busy.join(timeout=20)
    assert not busy.is_alive() and not psutil.pid_exists(pid)


def test_dead_process_fails_its_games_and_is_replaced(host: EngineHost) -> None:
    (game,) = games(1)
    hosted = host.play(game.name, game.problem, game.goal)
    hosted.reset()
    (pid,) = running(host)
    os.kill(pid, signal.SIGKILL)
    with refused("worker_ended", -9):
        hosted.step("look")
    with refused("game_lost"):
        hosted.step("look")
    hosted.close()
    assert host.play(game.name, game.problem, game.goal).reset().commands
    (again,) = running(host)
    host.close()
    assert again != pid and not psutil.pid_exists(again)


@pytest.mark.parametrize(
    ("plan", "value"),
    [(lambda plan: plan[:-1], "commands"), (lambda plan: ("fly away", *plan), "'fly away'")],
)
def test_games_stage_rejects_plans_that_do_not_win(
    plan: Callable[[tuple[str, ...]], tuple[str, ...]], value: str, tmp_path: Path
) -> None:
    whole, broken = games(2)
    for game in (whole, replace(broken, plan=plan(broken.plan))):
        write_game(game, tmp_path / "given")
    source = {"source": "folder", "path": str(tmp_path / "given"), "digest": games_digest(tmp_path / "given")}
    settings = GamesStageSettings.model_validate({"games": source, "train": 2, "valid_seen": 0, "valid_unseen": 0})
    machine = make_machine(store=tmp_path / "store", workers__environments=2)
    with refused("game_not_won", value, broken.name):
        run_stage("alfworld-games", settings, {}, machine)
