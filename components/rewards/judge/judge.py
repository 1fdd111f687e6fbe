"""The reward `judge`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from weakref import finalize

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.failures import RolloutFailed
from armature.components.contracts.secret_values import blanked
from armature.components.contracts.secrets import EnvironmentReference, resolve
from armature.components.rewards.extract import extracted
from armature.components.rewards.judge.asking import JudgeClient
from armature.components.rewards.judge.grades import grade_in, question
from armature.components.rewards.judge.kept import KeptReplies
from armature.components.rewards.judge.settings import PLACE, JudgeSettings, check_url
from armature.components.rewards.reward import BadAnswer, RewardInput

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
