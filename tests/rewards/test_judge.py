"""A judge behind a real HTTP server: each rollout is right, or failed by reason, and nothing is asked twice."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from armature.components.configuration import explain
from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.contracts.secrets import PLAIN_SECRET
from armature.components.rewards.judge.judge import grade_in, question
from armature.components.rewards.judge.settings import JudgeSettings
from armature.components.rewards.make import Rewards
from armature.components.rewards.reward import RewardInput
from tests.refusals import refused

from .grading import made
from .judge_server import JudgeServer, judge_server

pytestmark = pytest.mark.waits

SETTINGS: dict[str, Any] = {
    "model": "judge-1",
    "template": "Is {completion} the same as {answer}? mood: {mood}",
    "timeout": 30.0,
    "attempts": 2,
}


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    with judge_server() as started:
        yield started


@pytest.fixture(autouse=True)
def fresh(server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an empty cache, short waits between attempts, and a server whose counts are zero."""
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("armature.components.rewards.judge.asking.FIRST_WAIT", 0.01)
    for seen in (server.asked, server.bodies, server.times):
        seen.clear()
    server.most_at_once = 0


def judge(server: JudgeServer, **settings: Any) -> Rewards:
    return made("judge", **{**SETTINGS, "base_url": server.url, **settings})


def asked(rewards: Rewards, mood: str, completion: str = "red", answer: Any = "RED") -> dict[str, float]:
    return asyncio.run(rewards.grade(RewardInput(completion, answer, {"mood": mood})))


def test_judge_returns_grade_and_token_count(server: JudgeServer) -> None:
    with closing(judge(server, weight=2.0, system="You grade.", extra_body={"top_p": 0.5})) as rewards:
        assert rewards.weights == {"judge": 2.0, "judge tokens": 0.0}
        assert asked(rewards, "right") == {"judge": 1.0, "judge tokens": 12.0}
        assert asked(rewards, "half") == {"judge": 0.5, "judge tokens": 12.0}
    assert server.bodies[0] == {
        "model": "judge-1",
        "messages": [
            {"role": "system", "content": "You grade."},
            {"role": "user", "content": "Is red the same as RED? mood: right"},
        ],
        "temperature": 0.0,
        "max_completion_tokens": 512,
        "top_p": 0.5,
    }


FAILURES = {
    **dict.fromkeys(("wordless", "silent", "beyond"), ("judge_unreadable", 1)),
    **dict.fromkeys(("garbage", "brackets", "odd", "list", "flood"), ("judge_unavailable", 2)),
    **dict.fromkeys(("busy", "broken", "gone", "cut"), ("judge_unavailable", 2)),
    **dict.fromkeys(("redirect", "bad"), ("judge_refused", 1)),
    "patient": ("judge_unavailable", 1),
}
RECOVERS = ("busy-once", "dated-once", "broken-once", "gone-once", "garbage-once")


def test_faulty_server_gives_grades_or_reasons_and_second_run_asks_only_failures(server: JudgeServer) -> None:
    """All at the same time, as the rollouts of a step are."""
    moods = [*FAILURES, *RECOVERS, "right", "half", "late"]

    def play() -> dict[str, Any]:
        with closing(judge(server)) as rewards, ThreadPoolExecutor(len(moods)) as threads:
            futures = {mood: threads.submit(asked, rewards, mood) for mood in moods}
        return {mood: future.exception() or future.result() for mood, future in futures.items()}

    first = play()
    counts = {text.rpartition(" ")[2]: count for text, count in server.asked.items()}
    for mood, (reason, attempts) in FAILURES.items():
        failed = first.pop(mood)
        assert isinstance(failed, RolloutFailed), (mood, failed)
        assert (failed.reason, counts[mood]) == (reason, attempts), failed
        assert failed.detail.startswith("judge: ")
    expected = {mood: 0.5 if mood == "half" else 1.0 for mood in moods if mood not in FAILURES}
    assert {mood: graded["judge"] for mood, graded in first.items()} == expected
    assert all(counts[mood] == 2 for mood in RECOVERS)

    server.asked.clear()
    second = play()
    assert {mood: second[mood] for mood in expected} == {
        mood: {"judge": value, "judge tokens": 0.0} for mood, value in expected.items()
    }
    assert {text.rpartition(" ")[2] for text in server.asked} == set(FAILURES)


def test_retries_after_timeout(server: JudgeServer) -> None:
    with closing(judge(server, timeout=2.0)) as rewards:
        assert asked(rewards, "hung-once")["judge"] == 1.0
    with (
        closing(judge(server, timeout=0.3)) as rewards,
        refused("judge_timeout", "judge: ", "0.3 s", "attempt 2"),
    ):
        asked(rewards, "hung")


def test_waits_as_long_as_retry_after_says(server: JudgeServer) -> None:
    for mood in ("busy-once", "dated-once"):
        server.times.clear()
        with closing(judge(server)) as rewards:
            assert asked(rewards, mood, completion="wait")["judge"] == 1.0
        first, second = server.times
        assert 0.9 - (mood == "dated-once") <= second - first < 10  # a date has whole seconds


def test_equal_questions_in_flight_share_one_request(server: JudgeServer) -> None:
    with closing(judge(server)) as rewards, ThreadPoolExecutor(8) as threads:
        graded = list(threads.map(lambda _: asked(rewards, "late"), range(8)))
    assert all(each["judge"] == 1.0 for each in graded)
    assert sum(each["judge tokens"] for each in graded) == 12.0
    assert sum(server.asked.values()) == 1


def test_status_429_reduces_requests_in_flight(server: JudgeServer) -> None:
    """It takes three requests at a time, and refuses what is more."""
    with closing(judge(server, attempts=6)) as rewards, ThreadPoolExecutor(24) as threads:
        graded = threads.map(lambda index: asked(rewards, "narrow", completion=str(index)), range(24))
        assert [each["judge"] for each in graded] == [1.0] * 24
    assert server.most_at_once > 3
    assert len(server.bodies) < 4 * 24


def test_cancelled_caller_does_not_cancel_the_request(server: JudgeServer) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rewards.grade(RewardInput("red", "RED", {"mood": "late"})), 0.05)

    with closing(judge(server)) as rewards:
        asyncio.run(give_up())
        time.sleep(0.6)
        assert asked(rewards, "late") == {"judge": 1.0, "judge tokens": 0.0}
    assert sum(server.asked.values()) == 1


def test_cache_distinguishes_model_template_and_address(server: JudgeServer) -> None:
    for settings in ({}, {"model": "judge-2"}, {"temperature": 0.5}, {"template": "{completion}? mood: {mood}"}, {}):
        with closing(judge(server, **settings)) as rewards:
            asked(rewards, "right")
    assert len(server.bodies) == 4


def test_cached_reply_is_reused_with_other_parsing_settings(server: JudgeServer) -> None:
    for settings, expected in (({}, 0.5), ({"best": 2.0}, 0.25), ({"after": "", "verdicts": {"grade": 1.0}}, 1.0)):
        with closing(judge(server, **settings)) as rewards:
            assert asked(rewards, "half")["judge"] == expected
    assert len(server.bodies) == 1


def test_damaged_cached_reply_is_requested_again(server: JudgeServer, tmp_path: Path) -> None:
    with closing(judge(server)) as rewards:
        asked(rewards, "right")
        (saved,) = (tmp_path / "cache/judge").rglob("*.json")
        for damage in (b"", b"[]", b'{"reply": 3}', b"\xff"):
            saved.write_bytes(damage)
            assert asked(rewards, "right") == {"judge": 1.0, "judge tokens": 12.0}
    assert len(server.bodies) == 5


def test_keys_and_addresses_are_never_shown(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"api_key": {"env": "JUDGE_KEY"}, "base_url": {"env": "JUDGE_URL"}}
    with pytest.raises(ConfigurationError) as error:
        judge(server, **settings)
    assert "JUDGE_KEY" in error.value.what
    monkeypatch.setenv("JUDGE_KEY", "sekrit-key")
    monkeypatch.setenv("JUDGE_URL", "not an address")
    with refused("invalid_judge_address", "JUDGE_URL"):
        judge(server, **settings)
    monkeypatch.setenv("JUDGE_URL", server.url)
    with closing(judge(server, **settings)) as rewards:
        assert asked(rewards, "right")["judge"] == 1.0
        with refused("judge_refused", "***") as failed:
            asked(rewards, "bad")
    assert "sekrit" not in str(failed.value)
    assert "Bearer sekrit-key" in server.keys
    monkeypatch.setenv("JUDGE_URL", "ftp://someone:password@host/v1")
    with refused("invalid_judge_address", "JUDGE_URL") as failed:
        judge(server, **settings)
    assert "password" not in str(failed.value) and failed.value.__cause__ is None
    with refused(PLAIN_SECRET, kind=ValidationError) as failed:
        settings_of(api_key="sekrit-key")
    explained = explain(failed.value, "section", JudgeSettings)
    assert "section.api_key: " in explained and "sekrit" not in explained


def test_loopback_requests_bypass_proxies(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delitem(os.environ, "no_proxy", raising=False)
    with closing(judge(server)) as rewards:
        assert asked(rewards, "right")["judge"] == 1.0


def test_close_fails_requests_in_flight(server: JudgeServer) -> None:
    rewards = judge(server)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(asked, rewards, "hung")
        time.sleep(0.3)
        start = time.monotonic()
        rewards.close()
        with refused("judge_unavailable", "judge: "):
            waiting.result(10)
        assert time.monotonic() - start < 5
    with refused("judge_unavailable", "judge: "):
        asked(rewards, "right")


def test_unreachable_judge_fails_rollouts() -> None:
    with (
        closing(made("judge", **SETTINGS, base_url="http://127.0.0.1:1/v1")) as rewards,
        refused("judge_unavailable", "judge: ", "ClientConnectorError"),
    ):
        asked(rewards, "right")


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "ftp://host/v1"},
        {"base_url": "localhost:8000"},
        {"base_url": "http://user:password@host/v1"},
        {"template": "What is {answer}?"},
        {"worst": 1.0},
        {"verdicts": {"yes": 2.0}},
        {"extra_body": {"api_key": "sekrit-key"}},
    ],
)
def test_rejects_impossible_judge_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        settings_of(**settings)


def settings_of(**changes: Any) -> JudgeSettings:
    return JudgeSettings(name="judge", **{**SETTINGS, "base_url": "http://host/v1", **changes})


@pytest.mark.parametrize(
    ("reply", "settings", "expected"),
    [
        ("Grade: 0.7", {}, 0.7),
        ("Grade: 7/10", {"best": 10.0}, 0.7),
        ("Grade: **7** / 10.", {"best": 10.0}, 0.7),
        ("Grade: **7**", {"best": 10.0}, 0.7),
        ("[[3]]", {"after": "[[", "worst": 1.0, "best": 5.0}, 0.5),
        ("0.25", {"after": ""}, 0.25),
        ("Verdict: yes.", {"after": "Verdict:", "verdicts": {"Yes": 1.0, "no": 0.0}}, 1.0),
        ("**NO**, because", {"after": "", "verdicts": {"yes": 1.0, "no": 0.0}}, 0.0),
        ('So {"grade": 0.5}', {"json_key": "grade"}, 0.5),
        ('{"grade": {"of": 1}} {"grade": 0.25, "why": "{"}', {"json_key": "grade"}, 0.25),
        ('{"ok": true}', {"json_key": "ok", "verdicts": {"true": 1.0, "false": 0.0}}, 1.0),
        ("Grade: 2", {"worst": 10.0, "best": 0.0}, 0.8),
    ],
)
def test_parses_grades_from_replies(reply: str, settings: dict[str, Any], expected: float) -> None:
    assert grade_in(reply, settings_of(**settings)) == pytest.approx(expected)


NO_JSON_GRADE = ("{" * 100_000, '{"grade": null}', '{"grade": 1e400}', '{"grade": NaN}', '{"other": 1}', "[1]")


@pytest.mark.parametrize(
    ("reply", "settings"),
    [
        *((reply, {}) for reply in ("", "Grade:", "Grade: none", "Grade: -1", "Grade: nan")),
        ("perhaps", {"after": "", "verdicts": {"yes": 1.0}}),
        *((reply, {"json_key": "grade"}) for reply in NO_JSON_GRADE),
    ],
    ids=lambda value: str(value)[:16],
)
def test_reply_without_grade_is_unreadable(reply: str, settings: dict[str, Any]) -> None:
    with refused("judge_unreadable"):
        grade_in(reply, settings_of(**settings))


@pytest.mark.parametrize("key", ["case-key-0123456789", "a/b+c==/d", 'with "quotes" \\ and %'])
@pytest.mark.parametrize("mood", ["echo-status", "echo-other", "echo-late", "echo-escaped", "echo-chat", "echo-grade"])
def test_key_in_a_reply_is_blanked(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, mood: str
) -> None:
    monkeypatch.setattr("armature.components.contracts.errors._forms", set())
    monkeypatch.setenv("JUDGE_KEY", key)
    with closing(judge(server, api_key={"env": "JUDGE_KEY"}, attempts=1)) as rewards:
        if mood == "echo-grade":
            assert asked(rewards, mood)["judge"] == 1.0
        else:
            with pytest.raises(RolloutFailed) as failed:
                asked(rewards, mood)
            assert not any(part in str(failed.value) for part in (key, key[:6], key[-6:]))
    assert f"Bearer {key}" in server.keys
    stored = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not any(key.encode() in path.read_bytes() for path in stored)


def test_template_placeholders_are_filled_once() -> None:
    arguments = RewardInput("ignored", ["a", "b"], {"kind": "{answer}", "size": 3})
    text = question(arguments, "{answer} {kind}", '{completion}, {answer}, {kind}, {size}: reply {"grade": 1}')
    assert text == '{answer} {kind}, ["a", "b"], {answer}, 3: reply {"grade": 1}'
    with refused("bad_answer", "'colour'"):
        question(arguments, "", "{completion} {colour}")
