"""A user's function: whatever it does costs its own rollout, and the next one is graded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from armature.components.machine.project import project
from armature.components.rewards.make import Rewards, reward_sources
from armature.components.rewards.reward import RewardSettings
from tests.refusals import refused

from .grading import grade, made

MODULE = """
import asyncio, json, os, sys, threading, time
import numpy as np
from my_words import ACCEPTED, ratio

class Odd:
    def __str__(self): raise RuntimeError
    __repr__ = __str__

class OddError(Exception):
    def __str__(self): raise RuntimeError

def reward(completion, answer, row):
    match completion:
        case "right": return 1.0 if answer in ACCEPTED and row["kind"] == "test" else 0.25
        case "true": return True
        case "numpy" | "array": return np.float32(0.5) if completion == "numpy" else np.array(0.5)
        case "print":
            print("whatever", flush=True)
            os.write(1, b"more")
            return 0.5
        case "threads":
            threading.Thread(target=time.sleep, args=(600,)).start()
            return 0.5
        case "nan": return float("nan")
        case "inf": return -np.inf
        case "huge": return 10**400
        case "text": return "1.0"
        case "none": return None
        case "list": return [1.0]
        case "object": return Odd()
        case "complex": return 1j
        case "raise": raise ValueError("not this")
        case "odd error": raise OddError
        case "in a helper": return ratio(0)
        case "in a library": return json.loads("{")
        case "recursion": return reward(completion, answer, row)
        case "exit": sys.exit(3)
        case "os exit": os._exit(0)
        case "kill": os.kill(os.getpid(), 9)
        case "sockets":
            os.closerange(3, 65536)
            return 1.0
        case "hang": time.sleep(600)
        case "spin":
            while True: pass

async def awaited(completion, *, answer):
    await asyncio.sleep(0.01)
    return 1.0

def keywords(completion, **others): return float(sorted(others) == ["answer", "row"])
def unknown(completion, prompts): return 1.0
def nothing(): return 1.0
def optional(completion, strict=True): return float(strict)
number = 3
"""

FAILURES = {
    "nan": ("reward_invalid", "nan"),
    "inf": ("reward_invalid", "-inf"),
    "huge": ("reward_invalid", "inf"),
    "text": ("reward_invalid", "str '1.0'"),
    "none": ("reward_invalid", "NoneType"),
    "list": ("reward_invalid", "list"),
    "object": ("reward_invalid", "Odd"),
    "complex": ("reward_invalid", "complex"),
    "raise": ("reward_error", "ValueError: not this (", 'my_rewards.py, line 33: case "raise": raise ValueError'),
    "odd error": ("reward_error", "OddError", "my_rewards.py, line 34: "),
    "in a helper": ("reward_error", "ZeroDivisionError", "my_words.py, line 2: def ratio(words): return 1 / words"),
    "in a library": ("reward_error", "JSONDecodeError", 'my_rewards.py, line 36: case "in a library": '),
    "recursion": ("reward_error", "RecursionError"),
    "exit": ("reward_died", ""),
    "os exit": ("reward_died", "code 0"),
    "kill": ("reward_died", "code -9"),
    "sockets": ("reward_died", ""),
    "hang": ("reward_timeout", "2 s"),
    "spin": ("reward_timeout", "2 s"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recipe")
    (root / "my_rewards.py").write_text(MODULE)
    (root / "my_words.py").write_text('ACCEPTED = ["yes"]\ndef ratio(words): return 1 / words\n')
    return root


@pytest.fixture(scope="module")
def function(folder: Path) -> Iterator[Rewards]:
    with closing(made("function", folder, function="my_rewards:reward", timeout=2.0)) as rewards:
        yield rewards


def test_function_beside_recipe_grades_completions(function: Rewards) -> None:
    row = {"kind": "test"}
    assert grade(function, "right", "yes", row) == 1.0
    assert grade(function, "right", "no", row) == 0.25
    for completion, expected in {"true": 1.0, "numpy": 0.5, "array": 0.5, "print": 0.5, "threads": 0.5}.items():
        assert grade(function, completion, "yes", row) == expected


@pytest.mark.parametrize("completion", FAILURES)
def test_failing_function_costs_only_its_own_rollout(function: Rewards, completion: str) -> None:
    start = time.monotonic()
    reason, *values = FAILURES[completion]
    with refused(reason, "function: ", *values):
        grade(function, completion, "yes", {"kind": "test"})
    assert time.monotonic() - start < 60
    assert grade(function, "right", "yes", {"kind": "test"}) == 1.0


@pytest.mark.parametrize("name", ["awaited", "keywords", "optional"])
def test_function_may_be_async_and_omit_arguments(folder: Path, name: str) -> None:
    with closing(made("function", folder, function=f"my_rewards:{name}")) as rewards:
        assert grade(rewards, "anything", "yes") == 1.0


@pytest.mark.parametrize(
    ("function", "code", "value"),
    [
        ("my_rewards:unknown", "unknown_reward_argument", "'prompts'"),
        ("my_rewards:nothing", "completion_not_taken", ""),
        ("my_rewards:number", "not_a_function", ""),
        ("my_rewards:color", "name_not_in_module", "my_rewards.py"),
        ("my_reward:reward", "module_missing", "my_reward.py"),
        ("my_broken:reward", "name_not_loadable", "line 1"),
        ("my_leaving:reward", "name_not_loadable", "SystemExit: 3"),
    ],
)
def test_rejects_unusable_function_at_start(folder: Path, function: str, code: str, value: str) -> None:
    (folder / "my_broken.py").write_text("def reward(")
    (folder / "my_leaving.py").write_text("raise SystemExit(3)")
    with refused(code, function, value):
        made("function", folder, function=function)


def test_fingerprint_includes_function_and_its_imports(tmp_path: Path) -> None:
    settings = [RewardSettings.model_validate({"name": "function", "function": "my_rewards:reward"})]

    def sources() -> dict[str, str]:
        with project(tmp_path):
            return reward_sources(settings)

    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "my_words.py").write_text("ACCEPTED = []\n")
    (tmp_path / "unrelated.py").write_text("")
    first = sources()
    (tmp_path / "unrelated.py").write_text("VALUE = 1\n")
    assert sources() == first
    (tmp_path / "my_words.py").write_text("ACCEPTED = [1]\n")
    second = sources()
    assert second != first
    (tmp_path / "my_rewards.py").write_text(MODULE + "\n")
    assert sources() not in (first, second)


def test_rejects_reward_code_changed_during_run(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("import os\ndef reward(completion):\n    return 1.0 if completion else os._exit(1)\n")
    with closing(made("function", tmp_path, function="my_rewards:reward")) as rewards:
        file.write_text("def reward(completion):\n    return 0.5\n")
        assert grade(rewards, "x", None) == 1.0
        with refused("reward_died"):
            grade(rewards, "", None)
        with refused("reward_error", "function: "):
            grade(rewards, "x", None)
