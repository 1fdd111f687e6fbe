"""Rewards in processes: what hangs, dies or lies costs its own rollout, and the next one is graded."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from armature.components.rewards.function import Command, CommandSettings
from armature.components.rewards.json_schema import JsonSchema, JsonSchemaSettings
from armature.components.rewards.make import Rewards
from armature.components.rewards.reward import RewardInput
from tests.refusals import refused

from .grading import grade, made


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def math() -> Iterator[Rewards]:
    pytest.importorskip("math_verify")
    with closing(made("math", timeout=60.0)) as rewards:
        yield rewards


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"The answer is $\frac{2}{4}$.", r"\frac{1}{2}", 1.0),
        (r"so \boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("x^2 + 2x + 1", "(x+1)^2", 1.0),
        (r"$\{2, 1\}$", r"\{1, 2\}", 1.0),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1.0),
        ("3", 3, 1.0),
        ("4", ["3", "4"], 1.0),
        ("x^2 + 1", "(x+1)^2", 0.0),
        (r"\boxed{3}, not $4$", "4", 0.0),
        ("", "3", 0.0),
        ("no idea", "3", 0.0),
        (r"\boxed{", "3", 0.0),
        ("9" * 30_000, "3", 0.0),
    ],
)
def test_mathematical_equivalence(math: Rewards, completion: str, answer: Any, expected: float) -> None:
    assert grade(math, completion, answer) == expected


def test_answer_without_mathematics_raises_bad_answer(math: Rewards) -> None:
    math.check("3")
    for answer in ("...", None, ["3", "??"]):
        with refused("bad_answer", "math: "):
            math.check(answer)
        with refused("bad_answer", "math: "):
            grade(math, "3", answer)


def test_endless_mathematics_gets_zero() -> None:
    pytest.importorskip("math_verify")
    with closing(made("math", timeout=0.5)) as rewards:
        for endless in (r"\boxed{" + "9^{" * 6 + "9" + "}" * 7, "9!!!!!!", "$10^{1000000000}$", "$9999999999999999!$"):
            assert grade(rewards, endless, "3") == 0.0
        assert grade(rewards, "3", "3") == 1.0


def test_regex_matches_pattern_or_group() -> None:
    result = {"it is red": 1.0, "it is reddish": 0.0, "": 0.0}
    grouped = {"color=blue color=Red": 1.0, "color=red color=blue": 0.0, "red": 0.0, "color=": 0.0}
    for arguments, grades in [
        ({"pattern": r"\bred\b"}, result),
        ({"pattern": r"color=(\w+)?", "group": 1}, grouped),
        ({"pattern": r"color=(?P<color>\w+)", "group": "color"}, grouped),
    ]:
        with closing(made("regex", **arguments)) as rewards:
            for completion, expected in grades.items():
                assert grade(rewards, completion, "red") == expected, (arguments, completion)


@pytest.mark.parametrize(
    "arguments", [{"pattern": "("}, {"pattern": "a", "group": 1}, {"pattern": "(?P<a>b)", "group": "b"}]
)
def test_rejects_invalid_pattern(arguments: dict[str, Any]) -> None:
    with refused("value_error"):
        made("regex", **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "regex", "pattern": "^(a+)+$"},
        {"name": "json_schema", "json_schema": {"pattern": "^(a+)+$"}, "extract": "<answer>"},
    ],
    ids=["regex", "json_schema"],
)
def test_catastrophic_backtracking_gets_zero(arguments: dict[str, Any]) -> None:
    form = "{}" if arguments["name"] == "regex" else '<answer>"{}"</answer>'
    with closing(made(**arguments, timeout=0.5)) as rewards:
        assert grade(rewards, form.format("aaa"), None) == 1.0
        processes = children()
        assert grade(rewards, form.format("a" * 40 + "b"), None) == 0.0
        assert grade(rewards, form.format("aaa"), None) == 1.0
        assert children() == processes


def test_hanging_process_fails_its_rollout() -> None:
    """Without CPU time spent, the completion is not to blame."""
    with closing(made("regex", pattern="^a+$", timeout=0.25)) as rewards:
        assert grade(rewards, "aaa", None) == 1.0
        graders = [
            each
            for each in psutil.Process().children(recursive=True)
            if each.cmdline()[1:3] == ["-m", "armature.components.rewards.worker"]
        ]
        assert graders
        for each in graders:
            each.suspend()
        with refused("reward_timeout"):
            grade(rewards, "aaa", None)
        assert grade(rewards, "aaa", None) == 1.0


SCHEMA = {
    "type": "object",
    "properties": {"color": {"$ref": "#/$defs/color"}},
    "required": ["color"],
    "$defs": {"color": {"enum": ["red", "blue"]}},
}


@pytest.mark.parametrize("arguments", [{"json_schema": SCHEMA}, {"file": "schema.json"}], ids=["inline", "file"])
def test_json_is_validated_by_schema(arguments: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    red = '{"color": "red"}'
    wrong = ['{"color": "green"}', "{}", '"red"', f"It is {red}", '{"color": NaN}', ""]
    with closing(made("json_schema", tmp_path, **arguments)) as rewards:
        assert [grade(rewards, each, None) for each in (red, f"```json\n{red}\n```")] == [1.0, 1.0]
        for completion in (*wrong, "{" * 100_000, "[" * 100_000, "9" * 10_000):
            assert grade(rewards, completion, None) == 0.0, completion[:100]


NUMBERS = {"type": "object", "properties": {"c": {"multipleOf": 0.01}, "i": {"type": "integer"}, "n": {"minimum": 0}}}


WRONG_NUMBERS = [
    *('{"c": 0.005}', '{"c": 1e999}', '{"c": -1e999}', '{"c": 1e308}', '{"c": 1' + "0" * 400 + "}"),
    *('{"i": 1' + "0" * 5000 + "}", '{"n": 1e400}', '{"other": [1e999]}', '{"n": Infinity}'),
    *("```json\n" + "\n" * 20_000, "```" + " \n" * 20_000 + "x", "```json\n" + "[" * 20_000 + "\n```"),
    *('```{"c": 0.5}```', '```python\n{"c": 0.5}\n```'),
]


def test_json_numbers_beyond_float_get_zero() -> None:
    right = ['{"c": 0.5}', '{"i": 1' + "0" * 400 + "}", '```\n{"c": 0.5}\n```', '  ```JSON \n\n{"c": 0.5}\n\n ``` ']
    with closing(made("json_schema", json_schema=NUMBERS)) as rewards:
        for completion in (*right, *WRONG_NUMBERS):
            assert grade(rewards, completion, None) == float(completion in right), completion[:100]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"json_schema": {"type": "colour-less"}}, "invalid_json_schema"),
        ({"json_schema": {"$ref": "https://example.org/schema.json"}}, "unknown_schema_reference"),
        ({"json_schema": {"$ref": "#/$defs/color"}}, "unknown_schema_reference"),
        ({"json_schema": {"properties": {"r": {"$dynamicRef": "#color"}}}}, "unknown_schema_reference"),
        (
            {"json_schema": {"$defs": {"x": {"$id": "http://host/x", "$ref": "color"}}, "$ref": "#/$defs/x"}},
            "unknown_schema_reference",
        ),
        ({"file": "absent.json"}, "schema_unreadable"),
        ({"file": "../schema.json"}, "schema_unreadable"),
    ],
)
def test_rejects_invalid_schema_at_start(arguments: dict[str, Any], code: str, tmp_path: Path) -> None:
    with refused(code):
        JsonSchema(JsonSchemaSettings(name="json_schema", **arguments), tmp_path)


VERIFIER = """#!{python}
import json, os, resource, sys, time
given = json.load(sys.stdin)
match given["completion"]:
    case "right": print(1.0 if given["answer"] == "yes" and given["row"]["kind"] == "test" else 0.0)
    case "where": print(len(os.getcwd()))
    case "text": print("one")
    case "nan": print("nan")
    case "nothing": pass
    case "fail": sys.exit("cannot say")
    case "hang": time.sleep(600)
    case "flood":
        while True: print("1" * 10**6)
    case "deaf": sys.stdin.close(); print(0.5)
    case "complain":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        sys.stderr.write("x" * 2**23)
        sys.exit("cannot say")
"""


def test_program_grades_completions(tmp_path: Path) -> None:
    program = tmp_path / "verify"
    program.write_text(VERIFIER.format(python=sys.executable))
    with refused("program_missing", f"chmod +x {program}"):
        made("command", tmp_path, command=["./verify"])
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    row = {"kind": "test"}
    with closing(made("command", tmp_path, command=["./verify"], timeout=5.0)) as rewards:
        assert grade(rewards, "right", "yes", row) == 1.0
        assert grade(rewards, "right", "no", row) == 0.0
        assert grade(rewards, "where", "", row) == len(str(tmp_path.resolve()))
        assert grade(rewards, "deaf", "x" * 10**6, row) == 0.5
        for completion, reason, value in [
            ("text", "reward_invalid", "'one"),
            ("nan", "reward_invalid", "nan"),
            ("nothing", "reward_invalid", "''"),
            ("fail", "reward_error", "1: cannot say"),
            ("complain", "reward_error", "x" * 900 + "cannot say"),
            ("flood", "reward_invalid", ""),
            ("hang", "reward_timeout", "5 s"),
        ]:
            with refused(reason, "command: ", value):
                grade(rewards, completion, "", row)
        assert grade(rewards, "right", "yes", row) == 1.0


@pytest.mark.parametrize("command", [["./absent"], ["no-such-program-anywhere"]])
def test_rejects_missing_program_at_start(command: list[str], tmp_path: Path) -> None:
    with refused("program_missing", command[0]):
        Command(CommandSettings(name="command", command=command), tmp_path)


def test_threads_share_processes_which_end_on_close() -> None:
    before = children()
    with closing(made("regex", pattern="x")) as rewards, ThreadPoolExecutor(16) as threads:
        values = threads.map(lambda index: grade(rewards, "x" * (index % 2), None), range(64))
        assert list(values) == [0.0, 1.0] * 32
        started = children() - before  # processes of earlier tests may end meanwhile
        assert started
    assert not children() & started


def test_close_fails_grades_in_flight_and_waiting() -> None:
    rewards = made("regex", pattern="^(a+)+$", timeout=600.0)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(grade, rewards, "a" * 40 + "b", None) for _ in range(2)]
        time.sleep(0.5)
        rewards.close()
        for each in waiting:
            with refused("reward_died"):
                each.result(20)
    with refused("reward_died"):
        grade(rewards, "a", None)


def test_cancelled_grade_is_not_started() -> None:
    with closing(made("regex", pattern="^(a+)+$", timeout=1.0)) as rewards:

        async def given_up() -> None:
            slow = asyncio.ensure_future(rewards.grade(RewardInput("a" * 40 + "b", None, {})))
            await asyncio.sleep(0.1)
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(rewards.grade(RewardInput("a" * 40 + "b", None, {})), 0.01)
            assert await slow == {"regex": 0.0}

        start = time.monotonic()
        asyncio.run(given_up())
        assert grade(rewards, "a", None) == 1.0
        assert time.monotonic() - start < 30
