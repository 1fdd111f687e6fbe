"""The reward `judge`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from weakref import finalize

from armature.components.contracts.errors import ConfigurationError, RolloutFailed, blanked
from armature.components.contracts.secrets import EnvironmentReference, resolve
from armature.components.contracts.value_text import value_text
from armature.components.rewards.judge.asking import JudgeClient, KeptReplies
from armature.components.rewards.judge.settings import PLACE, JudgeSettings, check_url
from armature.components.rewards.number import read_number
from armature.components.rewards.reward import BadAnswer, RewardInput, extracted

# What a judge is asked, and the grade in what it replies.

_OF = re.compile(r"(?<=\d)\W{0,4}/\W{0,4}\d+(?:\.\d+)?")
"""In 7/10, what the grade is out of."""
_WORD = re.compile(r"[^\w]{0,20}(\w[\w-]{0,63})")


def question(given: RewardInput, completion: str, template: str) -> str:
    """The template with its places filled; places in what is filled in are text.

    Raises:
        BadAnswer: the row lacks a column that the template names.
    """

    def value(place: re.Match[str]) -> str:
        name = place.group(1)
        if name == "completion":
            return completion
        found = given.answer if name == "answer" else given.row.get(name)
        if found is None:
            raise BadAnswer(f"the template names {name!r}, which the row lacks")
        return json.dumps(found, ensure_ascii=False) if isinstance(found, list | dict) else value_text(found)

    return PLACE.sub(value, template)


def grade_in(reply: str, settings: JudgeSettings) -> float:
    """From 0 for the worst grade to 1 for the best.

    Raises:
        RolloutFailed: `judge_unreadable`: there is none.
    """
    said: Any = _value_of(reply, settings.json_key) if settings.json_key else _following(reply, settings.after)
    number = _number(said, settings)
    if number is None or not settings.is_grade(number):
        raise RolloutFailed(
            "judge_unreadable", f"no grade from {settings.worst:g} to {settings.best:g} in {blanked(reply)!r:.1000}"
        )
    return (number - settings.worst) / (settings.best - settings.worst)


def _number(said: Any, settings: JudgeSettings) -> float | None:
    if isinstance(said, bool):
        said = str(said)
    if settings.verdicts and isinstance(said, str):
        word = _WORD.match(said)
        verdicts = {name.casefold(): grade for name, grade in settings.verdicts.items()}
        return verdicts.get(word.group(1).casefold()) if word else None
    if isinstance(said, int | float):
        return float(said) if abs(said) < 1e15 else None
    return read_number(_OF.sub("", said[:1000]), "first", 0.01) if isinstance(said, str) else None


def _following(reply: str, marker: str) -> str | None:
    _, found, rest = reply.rpartition(marker) if marker else ("", "all", reply)
    return rest if found else None


def _value_of(reply: str, key: str) -> Any:
    found = None
    for document in _objects(reply):
        found = document.get(key, found)
    return found


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, outermost ones. At most 100 places are tried."""
    decoder, start = json.JSONDecoder(), text.find("{")
    for _ in range(100):
        if start < 0:
            return
        try:
            document, end = decoder.raw_decode(text, start)
            yield document
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)


CLOSING_SECONDS = 5.0


class Judge:
    """Asks from an event loop of its own, so that any thread and any loop may wait.

    What was asked once is not asked again, here or in a later run: readable replies are kept on disk, and equal
    questions in flight are one. The part "... tokens", of weight 0, is what was spent: 0 for a reply that was kept.
    """

    Settings: ClassVar = JudgeSettings
    runs: ClassVar = "service"

    def __init__(self, settings: JudgeSettings, folder: Path) -> None:
        self._settings, self._tokens = settings, f"{settings.part} tokens"
        self.weights = {settings.part: settings.weight, self._tokens: 0.0}
        where = f"reward {settings.part}"
        key = "" if settings.api_key is None else resolve({"api_key": settings.api_key}, where)["api_key"]
        self._kept = KeptReplies(str(settings.base_url))
        self._asking: dict[str, asyncio.Task[tuple[float, int]]] = {}
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name=where, daemon=True).start()
        self._client = asyncio.run_coroutine_threadsafe(
            _made(settings, _address(settings, where), key), self._loop
        ).result()
        self.close = finalize(self, _close, self._loop, self._client)

    @staticmethod
    def sources(settings: JudgeSettings) -> dict[str, str]:
        """The model, the template and the address are settings."""
        return {}

    @staticmethod
    def columns(settings: JudgeSettings) -> tuple[str, ...]:
        return tuple(name for name in PLACE.findall(settings.template) if name not in ("completion", "answer"))

    def check(self, answer: Any) -> None:
        if answer is None and "answer" in PLACE.findall(self._settings.template):
            raise BadAnswer("the template names the answer, which the row lacks")

    async def grade(self, given: RewardInput) -> dict[str, float]:
        """
        Raises:
            RolloutFailed: `bad_answer`, `judge_timeout`, `judge_unavailable`, `judge_refused` or `judge_unreadable`.
        """
        completion = extracted(given.completion, self._settings.extract)
        if completion is None:
            return {self._settings.part: 0.0, self._tokens: 0.0}
        body = self._body(question(given, completion, self._settings.template))
        if not self.close.alive:
            raise _closed()
        future = asyncio.run_coroutine_threadsafe(self._graded(body), self._loop)
        try:
            grade, tokens = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.close.alive or (task is not None and task.cancelling()):
                raise
            raise _closed() from None
        return {self._settings.part: grade, self._tokens: float(tokens)}

    async def _graded(self, body: dict[str, Any]) -> tuple[float, int]:
        """Whoever gives up waiting does not take back the question, whose reply is kept for the next one."""
        key = self._kept.key(body)
        reply = self._kept.get(key)
        if reply is not None:
            with suppress(RolloutFailed):  # it was read in another way then
                return grade_in(reply, self._settings), 0
        if key in self._asking:
            grade, _ = await asyncio.shield(self._asking[key])
            return grade, 0
        task = self._asking[key] = asyncio.ensure_future(self._asked(key, body))
        task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    async def _asked(self, key: str, body: dict[str, Any]) -> tuple[float, int]:
        reply = await self._client.ask(body)
        grade = grade_in(reply.text, self._settings)
        if blanked(reply.text) == reply.text:  # no secret is written to disk
            self._kept.keep(key, reply.text)
        return grade, reply.tokens

    def _forget(self, key: str, done: asyncio.Task[tuple[float, int]]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # that nobody waited for it any more is no warning

    def _body(self, text: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self._settings.system}] if self._settings.system else []
        return {
            "model": self._settings.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": self._settings.temperature,
            "max_completion_tokens": self._settings.max_tokens,
            **self._settings.extra_body,
        }


def _address(settings: JudgeSettings, where: str) -> str:
    """
    Raises:
        ConfigurationError: the variable that should hold it is not set, or holds something else.
    """
    if not isinstance(settings.base_url, EnvironmentReference):
        return settings.base_url
    url = resolve({"base_url": settings.base_url}, where)["base_url"]
    try:
        check_url(url)
    except ValueError:
        raise ConfigurationError(
            "the variable does not hold an address such as https://api.example.org/v1",
            code="invalid_judge_address",
            where=f"{where}, variable {settings.base_url.env}",
        ) from None
    return url


async def _made(settings: JudgeSettings, url: str, key: str) -> JudgeClient:
    return JudgeClient(settings, url, key)


def _close(loop: asyncio.AbstractEventLoop, client: JudgeClient) -> None:
    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await client.close()

    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(end(), loop).result(CLOSING_SECONDS)
    loop.call_soon_threadsafe(loop.stop)


def _closed() -> RolloutFailed:
    return RolloutFailed("judge_unavailable", "the rewards are closed")
