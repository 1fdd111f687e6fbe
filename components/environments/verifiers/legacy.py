"""The interface of verifiers 0.1.9 to 0.3: `load_environment`, datasets and rubrics."""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import verifiers
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from armature.components.contracts.errors import ConfigurationError
from armature.components.environments.verifiers.source import Row


class LegacySource:
    """An environment that `load_environment` returns; its rollouts are independent of each other."""

    def __init__(self, id: str, args: Mapping[str, Any], max_turns: int) -> None:
        load = getattr(verifiers, "load_environment", None)
        if load is None:
            raise ConfigurationError(
                "the installed verifiers has no load_environment",
                code="verifiers_version_unsupported",
                remedy='pip install "verifiers<0.4", or use interface = "v1"',
            )
        with _signals_untouched():
            self._environment = load(id, **args)
        if self._environment.max_turns < 1 or self._environment.max_turns > max_turns:
            self._environment.max_turns = max_turns
        self.max_turns: int = self._environment.max_turns

    def rows(self) -> tuple[Sequence[Row], Sequence[Row] | None]:
        train, heldout = self._environment.get_dataset(), self._environment.get_eval_dataset()
        return _rows(train), None if heldout is train else _rows(heldout)

    async def play(self, row: Row, base_url: str, key: str) -> dict[str, float]:
        http = DefaultAsyncHttpxClient(trust_env=False)  # no proxy: the endpoint is ours, on loopback
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=None, http_client=http) as client:
            state = await self._environment.rollout(materialized(row.value), _client(client), "policy", {})
        if state["error"] is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}") from state["error"]
        rubric = self._environment.rubric
        if "score_sem" in inspect.signature(rubric.score_rollout).parameters:  # until 0.1.9
            from verifiers.utils.async_utils import NullAsyncContext

            await rubric.score_rollout(state, score_sem=NullAsyncContext())
        else:
            await rubric.score_rollout(state)
            await rubric.cleanup(state)
        return {**state["metrics"], "reward": float(state["reward"])}


def _client(client: AsyncOpenAI) -> Any:
    """Return the client in the form that the installed version of the package verifiers expects.

    The client accepts empty answers.

    Version 0.1 calls the OpenAI client itself and accepts empty answers. Later versions wrap the client and raise an
    error for an empty answer.
    """
    try:
        from verifiers.clients import OpenAIChatCompletionsClient
    except ImportError:
        return client

    class PolicyClient(OpenAIChatCompletionsClient):
        """A client that accepts empty answers: the policy may write nothing, and the environment grades it."""

        async def raise_from_native_response(self, response: Any) -> None:
            with suppress(verifiers.EmptyModelResponseError):
                await super().raise_from_native_response(response)

        async def from_native_response(self, response: Any) -> Any:
            answer = await super().from_native_response(response)
            answer.message.content = answer.message.content or ""
            return answer

    return PolicyClient(client)


def _rows(dataset: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [_row(materialized(row)) for row in dataset]


def _row(value: dict[str, Any]) -> Row:
    prompt = value["prompt"]
    if not isinstance(prompt, list):
        raise ConfigurationError(
            "the environment completes text, and only environments that chat are supported",
            code="environment_without_chat",
        )
    return Row(value, _digest(value))


def _digest(document: Any) -> str:
    """Return a digest of a row's content; values that are not JSON count by their text."""
    return sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]


def materialized(value: Any) -> Any:
    """Return `value` with every iterable in it as a list.

    Pydantic validates a message's content as `Iterable`, which can be read only once: without this copy, a prompt that
    is read before it is sent would be sent empty.
    """
    if isinstance(value, Mapping):
        return {key: materialized(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [materialized(item) for item in value]
    return value


@contextmanager
def _signals_untouched() -> Iterator[None]:
    """Disable `signal.signal` while an environment is constructed.

    Constructors of verifiers install handlers for SIGINT and SIGTERM. That fails outside the main thread, and in it
    would replace our own handlers.
    """
    install = signal.signal
    signal.signal = lambda *arguments: None
    try:
        yield
    finally:
        signal.signal = install
