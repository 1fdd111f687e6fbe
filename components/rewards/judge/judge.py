"""The reward `judge`: ask another model for a grade, and parse the grade from its reply."""

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
from armature.components.rewards.judge.asking import JudgeClient, ReplyCache
from armature.components.rewards.judge.settings import PLACE, JudgeSettings, check_url
from armature.components.rewards.number import read_number
from armature.components.rewards.reward import BadAnswer, RewardInput, extracted

# --- The question to a judge, and the grade in its reply ---

_OF = re.compile(r"(?<=\d)\W{0,4}/\W{0,4}\d+(?:\.\d+)?")
"""Pattern of the "/10" in a grade such as 7/10."""
_WORD = re.compile(r"[^\w]{0,20}(\w[\w-]{0,63})")


def question(inputs: RewardInput, completion: str, template: str) -> str:
    """Return the question to the judge: the template with its placeholders filled in.

    Text of the form {name} within an inserted value is not filled in.

    Raises:
        BadAnswer: the row lacks a column that the template names.

    Example:
        >>> question(RewardInput("blue", answer="navy", row={}), "blue", "Is {completion} right? Truth: {answer}")
        'Is blue right? Truth: navy'
    """

    def value(place: re.Match[str]) -> str:
        name = place.group(1)
        if name == "completion":
            return completion
        inserted = inputs.answer if name == "answer" else inputs.row.get(name)
        if inserted is None:
            raise BadAnswer(f"the template names {name!r}, but the row has no such column")
        return json.dumps(inserted, ensure_ascii=False) if isinstance(inserted, list | dict) else value_text(inserted)

    return PLACE.sub(value, template)


def grade_in(reply: str, settings: JudgeSettings) -> float:
    """Return the grade in a judge's reply, from 0 for the worst to 1 for the best.

    Raises:
        RolloutFailed: `judge_unreadable`: the reply has no valid grade.
    """
    value: Any = _value_of(reply, settings.json_key) if settings.json_key else _following(reply, settings.after)
    number = _number(value, settings)
    if number is None or not settings.is_grade(number):
        raise RolloutFailed(
            "judge_unreadable", f"no grade from {settings.worst:g} to {settings.best:g} in {blanked(reply)!r:.1000}"
        )
    return (number - settings.worst) / (settings.best - settings.worst)


def _number(value: Any, settings: JudgeSettings) -> float | None:
    if isinstance(value, bool):
        value = str(value)
    if settings.verdicts and isinstance(value, str):
        word = _WORD.match(value)
        verdicts = {name.casefold(): grade for name, grade in settings.verdicts.items()}
        return verdicts.get(word.group(1).casefold()) if word else None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e15 else None
    return read_number(_OF.sub("", value[:1000]), "first", 0.01) if isinstance(value, str) else None


def _following(reply: str, marker: str) -> str | None:
    """Return the text of the reply after the last `marker`, or None if it has no `marker`. An empty marker selects the
    whole reply."""
    _, separator, rest = reply.rpartition(marker) if marker else ("", "all", reply)
    return rest if separator else None


def _value_of(reply: str, key: str) -> Any:
    """Return the value of `key` in the last JSON object of the reply that has this key; None if there is none."""
    value = None
    for document in _objects(reply):
        value = document.get(key, value)
    return value


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects in a text. At most 100 opening braces are tried, which bounds the time."""
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
"""Seconds to wait for the end of requests in flight when the judge is closed."""


class Judge:
    """A reward that asks another model. It runs its own event loop, so any thread and any event loop may wait for it.

    No question is sent twice: valid replies are cached on disk for later runs, and equal questions in flight share
    one request. The reward "<label> tokens", of weight 0, counts the tokens spent: 0 for a cached reply.
    """

    Settings: ClassVar = JudgeSettings
    runs: ClassVar = "service"

    def __init__(self, settings: JudgeSettings, folder: Path) -> None:
        self._settings, self._tokens = settings, f"{settings.part} tokens"
        self.weights = {settings.part: settings.weight, self._tokens: 0.0}
        where = f"reward {settings.part}"
        key = "" if settings.api_key is None else resolve({"api_key": settings.api_key}, where)["api_key"]
        self._cache = ReplyCache(str(settings.base_url))
        self._in_flight: dict[str, asyncio.Task[tuple[float, int]]] = {}
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name=where, daemon=True).start()
        self._client = asyncio.run_coroutine_threadsafe(
            _made(settings, _address(settings, where), key), self._loop
        ).result()
        self.close = finalize(self, _close, self._loop, self._client)

    @staticmethod
    def sources(settings: JudgeSettings) -> dict[str, str]:
        """Return an empty dictionary: grades depend only on settings, such as the model, the template and the
        address."""
        return {}

    @staticmethod
    def columns(settings: JudgeSettings) -> tuple[str, ...]:
        return tuple(name for name in PLACE.findall(settings.template) if name not in ("completion", "answer"))

    def check(self, answer: Any) -> None:
        if answer is None and "answer" in PLACE.findall(self._settings.template):
            raise BadAnswer("the template names the answer, which the row lacks")

    async def grade(self, inputs: RewardInput) -> dict[str, float]:
        """Return the reward and the number of tokens spent on it, by label.

        Raises:
            RolloutFailed: `bad_answer`, `judge_timeout`, `judge_unavailable`, `judge_refused` or `judge_unreadable`.
        """
        completion = extracted(inputs.completion, self._settings.extract)
        if completion is None:
            return {self._settings.part: 0.0, self._tokens: 0.0}
        body = self._body(question(inputs, completion, self._settings.template))
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
        """Return the grade and the number of tokens spent on it, which is 0 if another request has paid for the reply.

        The reply comes from the cache, from an equal question in flight, or from the server. If a caller stops waiting,
        the request goes on, and its reply is cached for the next caller.
        """
        key = self._cache.key(body)
        reply = self._cache.get(key)
        if reply is not None:
            with suppress(RolloutFailed):  # an earlier run parsed this reply with other settings
                return grade_in(reply, self._settings), 0
        if key in self._in_flight:
            grade, _ = await asyncio.shield(self._in_flight[key])
            return grade, 0
        task = self._in_flight[key] = asyncio.ensure_future(self._asked(key, body))
        task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    async def _asked(self, key: str, body: dict[str, Any]) -> tuple[float, int]:
        reply = await self._client.ask(body)
        grade = grade_in(reply.text, self._settings)
        if blanked(reply.text) == reply.text:  # never write a secret to disk
            self._cache.keep(key, reply.text)
        return grade, reply.tokens

    def _forget(self, key: str, done: asyncio.Task[tuple[float, int]]) -> None:
        del self._in_flight[key]
        if not done.cancelled():
            done.exception()  # mark the exception as retrieved: asyncio would warn if no caller waited for it

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
    """Return the judge's base URL, from the settings or an environment variable.

    Raises:
        ConfigurationError: the variable is not set, or does not hold a URL.
    """
    if not isinstance(settings.base_url, EnvironmentReference):
        return settings.base_url
    url = resolve({"base_url": settings.base_url}, where)["base_url"]
    try:
        check_url(url)
    except ValueError:
        raise ConfigurationError(
            "the variable does not hold a URL such as https://api.example.org/v1",
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
