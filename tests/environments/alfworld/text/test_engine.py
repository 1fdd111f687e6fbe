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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.contracts.machine import Machine
from components.environments.alfworld.games.game import SOURCES, Game
from components.environments.alfworld.games.load import load_games
from components.environments.alfworld.stage import GamesStageSettings
from components.environments.alfworld.text.host import EngineError, EngineHost, shared_host
from components.stages import run_stage

from ..games_of import GAMES, generated

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


async def said_by(host: EngineHost, game: Game, commands: list[str]) -> list[list[Any]]:
    hosted = host.play(game.name, game.problem, game.goal)
    shown = await hosted.reset()
    said = [["", shown.feedback, list(shown.commands), shown.won]]
    for command in commands:
        shown = await hosted.step(command)
        said.append([command, shown.feedback, list(shown.commands), shown.won])
    await hosted.close()
    return said


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = GamesStageSettings.model_validate(
        {"games": SMALL, "train": 12, "valid_seen": 12, "valid_unseen": 12, "seed": 4}
    )
    machine = Machine(store=str(tmp_path_factory.mktemp("store")), environment_processes=1)
    return run_stage("alfworld-games", settings, {}, machine).path


def test_alfworlds_own_environment_wins_every_exported_game_and_says_what_ours_says(
    exported: Path, host: EngineHost
) -> None:
    environment = {**os.environ, "ALFWORLD_DATA": str(exported), "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(HERE / "original.py"), str(exported), *SOURCES]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    original = json.loads(output.splitlines()[-1])["games"]
    assert len(original) == 36
    assert all(said[-1][3] is True and not said[0][3] for said in original.values())
    made = {f"{g.source}/{g.name}": g for s in SOURCES for g in load_games(generated(**SMALL), s, count=12, seed=4)}
    assert set(made) == set(original)
    for name, heard in original.items():
        for _ in range(2):  # the second time from what was kept; of problems that is fewer than there are here
            assert asyncio.run(said_by(host, made[name], [step[0] for step in heard[1:]])) == heard


def test_two_hundred_games_in_one_process_are_small_and_do_not_disturb_each_other(host: EngineHost) -> None:
    few = games(10)

    async def everything() -> tuple[list[bool], dict[str, Any]]:
        playing = [(host.play(game.name, game.problem, game.goal), game) for game in few * 20]
        await asyncio.gather(*(hosted.reset() for hosted, _ in playing))
        longest = max(len(game.plan) for game in few)
        won: dict[int, bool] = {}
        for step in range(longest):
            for number, (hosted, game) in enumerate(playing):
                if step < len(game.plan):
                    won[number] = (await hosted.step(game.plan[step])).won
        count = await host.worker(0).ask("count")
        await asyncio.gather(*(hosted.close() for hosted, _ in playing))
        return list(won.values()), count

    won, count = asyncio.run(everything())
    assert all(won) and len(won) == count["games"] == 200
    assert count["resident"] < 1.5 * 2**30
    assert asyncio.run(host.worker(0).ask("count"))["games"] == 0


def test_random_commands_do_not_win(host: EngineHost) -> None:
    """A guard against games that anything wins; the share is small, not zero, in games this small."""
    random_ = random.Random(0)

    async def wins(game: Game) -> bool:
        hosted = host.play(game.name, game.problem, game.goal)
        shown = await hosted.reset()
        for _ in range(10):
            shown = await hosted.step(random_.choice(shown.commands))
        return shown.won

    async def count() -> int:
        return sum([await wins(game) for game in games(24, seed=3)])

    assert asyncio.run(count()) <= 2


def test_games_share_the_process_of_their_namesakes() -> None:
    host = EngineHost(3)
    few = games(6)
    homes = [[host.play(game.name, game.problem, game.goal)._home for game in few] for _ in range(8)]
    assert all(row == [0, 1, 2, 0, 1, 2] for row in homes)
    assert host.running() == []  # started by the first reset


def test_environments_that_are_open_together_share_processes_and_the_last_one_ends_them() -> None:
    class User:
        pass

    one, other = User(), User()
    (host, leave), (same, _) = shared_host(7, one), shared_host(7, other)
    assert host is same and shared_host(8, one)[0] is not host
    process = host.worker(0)
    assert host.running() == [process]
    leave()
    leave()
    assert psutil.pid_exists(process.pid)
    del other
    assert not psutil.pid_exists(process.pid)


def test_a_problem_that_the_engine_cannot_read_fails_alone(host: EngineHost) -> None:
    (game,) = games(1)

    async def scenario() -> None:
        for problem in ("", "(define", game.problem.replace("(atLocation agent1", "(nowhere agent1")):
            with pytest.raises(EngineError, match="text engine failed"):
                await host.play("bad", problem, game.goal).reset()
        assert (await host.play(game.name, game.problem, game.goal).reset()).commands

    asyncio.run(scenario())


def test_a_goal_sentence_is_text_to_the_engine(host: EngineHost, tmp_path: Path) -> None:
    """The check before it refuses such a sentence; here it gets past it."""
    canary, (game,) = tmp_path / "canary", games(1)
    goal = f"{{open('{canary}', 'w')}} #look.feedback# [{{o.name | holds(a:agent, o:object)}}]"

    async def scenario() -> str:
        return (await host.play("hostile", game.problem, goal).reset()).feedback

    assert asyncio.run(scenario()).endswith(f"Your task is to: {goal}.")
    assert not canary.exists()


def test_a_process_that_dies_within_an_answer_fails_its_game_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is cut off where a pipe was full; the next game then has a process of its own."""
    dying = tmp_path / "dying"
    dying.write_text('#!/bin/sh\nread request\nprintf \'{"id": 0, "feedb\'\n')
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    host = EngineHost(1)

    async def scenario() -> None:
        for _ in range(2):
            async with asyncio.timeout(20):
                with pytest.raises(EngineError, match="ended with code 0"):
                    await host.play("cut", "", "").reset()

    asyncio.run(scenario())
    host.close()


def test_an_environment_may_be_forgotten_while_its_host_is_busy() -> None:
    """The garbage collector runs in whatever thread allocates, and may find the last user there."""

    class User:
        pass

    user = User()
    host, leave = shared_host(9, user)

    def leave_meanwhile() -> None:
        with host._lock:
            leave()

    busy = threading.Thread(target=leave_meanwhile, daemon=True)
    busy.start()
    busy.join(timeout=20)
    assert not busy.is_alive()


def test_processes_end_with_their_parent() -> None:
    code = (
        "import asyncio, os, signal\n"
        "from components.environments.alfworld.text.host import EngineHost\n"
        "host = EngineHost(1)\n"
        "asyncio.run(host.worker(0).ask('count'))\n"
        "print(host.running()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the process outlives its parent"
        time.sleep(0.05)


def test_a_process_that_dies_fails_its_games_and_the_next_game_starts_another(host: EngineHost) -> None:
    (game,) = games(1)

    async def scenario() -> None:
        hosted = host.play(game.name, game.problem, game.goal)
        await hosted.reset()
        os.kill(host.running()[0].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended with code -9"):
            await hosted.step("look")
        with pytest.raises(EngineError, match="ended with code -9"):
            await hosted.step("look")
        await hosted.close()
        again = host.play(game.name, game.problem, game.goal)
        assert (await again.reset()).commands

    asyncio.run(scenario())
    (process,) = host.running()
    host.close()
    assert not psutil.pid_exists(process.pid)
