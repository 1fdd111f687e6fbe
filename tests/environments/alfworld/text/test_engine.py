"""Our processes against alfworld's own environment, and what happens when a process or its parent dies."""

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
"""alfworld's own environment takes seconds for a game of usual size."""


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost(1)
    yield host
    host.close()


def games(count: int, seed: int = 0) -> list[Game]:
    return list(load_games(generated(), "train", count=count, seed=seed))


def said_by(host: EngineHost, game: Game, commands: list[str]) -> list[list[Any]]:
    hosted = host.play(game.name, game.problem, game.goal)
    shown = hosted.reset()
    said = [["", shown.feedback, list(shown.commands), shown.won]]
    for command in commands:
        shown = hosted.step(command)
        said.append([command, shown.feedback, list(shown.commands), shown.won])
    hosted.close()
    return said


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = GamesStageSettings.model_validate(
        {"games": SMALL, "train": 6, "valid_seen": 6, "valid_unseen": 6, "seed": 4}  # one of each kind
    )
    machine = make_machine(store=tmp_path_factory.mktemp("store"), workers__environments=1)
    return run_stage("alfworld-games", settings, {}, machine).path


def test_alfworlds_own_environment_wins_every_exported_game_and_says_what_ours_says(
    exported: Path, host: EngineHost
) -> None:
    environment = {**os.environ, "ALFWORLD_DATA": str(exported), "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(HERE / "original.py"), str(exported), *SOURCES]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    original = json.loads(output.splitlines()[-1])["games"]
    assert len(original) == 18
    assert all(said[-1][3] is True and not said[0][3] for said in original.values())
    made = {f"{g.source}/{g.name}": g for s in SOURCES for g in load_games(generated(**SMALL), s, count=6, seed=4)}
    assert set(made) == set(original)
    for name, heard in original.items():
        for _ in range(2):  # the second time from what was kept; of problems that is fewer than there are here
            assert said_by(host, made[name], [step[0] for step in heard[1:]]) == heard


def test_two_hundred_games_in_one_process_are_small_and_do_not_disturb_each_other(host: EngineHost) -> None:
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


def test_random_commands_do_not_win(host: EngineHost) -> None:
    """A guard against games that anything wins; the share is small, not zero, in games this small."""
    random_ = random.Random(0)

    def wins(game: Game) -> bool:
        hosted = host.play(game.name, game.problem, game.goal)
        shown = hosted.reset()
        for _ in range(10):
            shown = hosted.step(random_.choice(shown.commands))
        return shown.won

    assert sum(wins(game) for game in games(24, seed=3)) <= 2


def test_games_share_the_process_of_their_namesakes() -> None:
    host = EngineHost(3)
    few = games(6)
    homes = [[host.workers.index(host.play(game.name, "", "")._worker) for game in few] for _ in range(8)]
    assert all(row == [0, 1, 2, 0, 1, 2] for row in homes)
    assert running(host) == []  # started by the first reset


def running(host: EngineHost) -> list[int]:
    return [worker.pid for worker in host.workers if isinstance(worker, WorkerProcess) and worker.pid is not None]


def test_environments_that_are_open_together_share_processes_and_the_last_one_ends_them() -> None:
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
    assert psutil.pid_exists(pid)  # the episode goes on
    del episode
    assert not psutil.pid_exists(pid)


def test_a_problem_that_the_engine_cannot_read_fails_alone(host: EngineHost) -> None:
    (game,) = games(1)
    for problem in ("", "(define", game.problem.replace("(atLocation agent1", "(nowhere agent1")):
        with refused("game_engine_failed"):
            host.play("bad", problem, game.goal).reset()
    assert host.play(game.name, game.problem, game.goal).reset().commands


def test_a_goal_sentence_is_text_to_the_engine(host: EngineHost, tmp_path: Path) -> None:
    """The check before it refuses such a sentence; here it gets past it."""
    canary, (game,) = tmp_path / "canary", games(1)
    goal = f"{{open('{canary}', 'w')}} #look.feedback# [{{o.name | holds(a:agent, o:object)}}]"

    said = host.play("hostile", game.problem, goal).reset().feedback
    assert said.endswith(f"Your task is to: {goal}.")
    assert not canary.exists()


def test_an_environment_may_be_forgotten_while_its_process_is_busy() -> None:
    """The garbage collector runs in whatever thread allocates, and may find the last user there."""
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


def test_a_process_that_dies_fails_its_games_and_the_next_game_starts_another(host: EngineHost) -> None:
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
def test_a_game_that_its_plan_does_not_win_is_not_written(
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
