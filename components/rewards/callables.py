"""Rewards that are functions of the running program, which may be a script or a notebook."""

from __future__ import annotations

import asyncio
import inspect
import json
import marshal
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

from armature.components.contracts.errors import ConfigurationError, RolloutFailed, said
from armature.components.rewards.function import ARGUMENTS, accepted_arguments, parameters_of
from armature.components.rewards.reward import RewardInput
from armature.components.rewards.worker import finite_reward

SECONDS = 60.0
"""Seconds that one grade may take."""
SIGNATURES = (
    "write def reward(completion: str, answer, row: dict) -> float, of which answer and row may be left out, or TRL's "
    "def reward(completions: list, **columns) -> list[float]"
)


class CallableReward:
    """A reward that calls a function in this process, which may be async. Two signatures are told apart by their names:

    - `reward(completion, answer, row)` grades one completion and returns a number. It receives those
      arguments of the three that it names.
    - `reward(completions, **columns)` is TRL's: it receives lists of completions and of each column's values, and
      returns a list of numbers or None. The lists have one item, because each completion is graded as soon as it is
      sampled. None leaves this reward out of the completion's sum.

    A function that is not async runs in a thread. A grade that takes longer than `SECONDS` fails its rollout, but the
    thread goes on, since Python cannot end it. Safe to share between threads if the function is.

    Args:
        weight: factor of the reward in the weighted sum.
        columns: names of the rows' columns.
        chat: True if the rows' prompts are lists of messages. TRL's functions then receive completions as messages.

    Raises:
        ConfigurationError: `function` has neither signature, or requires a column that the rows do not have.

    Example:
        >>> reward = CallableReward(lambda completion, answer: completion == answer, weight=2.0, columns=["answer"])
        >>> asyncio.run(reward.grade(RewardInput("red", answer="red", row={}))), reward.weights
        ({'lambda': 1.0}, {'lambda': 2.0})
    """

    def __init__(
        self, function: Callable[..., Any], *, weight: float = 1.0, columns: Collection[str] = (), chat: bool = False
    ) -> None:
        plain = _without_partial(function)
        name = str(getattr(plain, "__name__", type(plain).__name__)).strip("<>")
        self._function, self.part, self._chat = function, name, chat
        self._columns, self._takes_list = _accepted(function, name, columns)
        self.weights = {name: weight}

    @property
    def sources(self) -> dict[str, str]:
        """SHA-256 of the function's source text by a name. Code and values that it refers to are not covered."""
        return {f"reward {self.part} source only": sha256(_source(self._function)).hexdigest()}

    def check(self, answer: Any) -> None:
        """Do nothing: only the function knows which answers it can compare."""

    async def grade(self, inputs: RewardInput) -> Mapping[str, float]:
        """Return the reward by the function's name; empty if a function with TRL's signature returns None.

        Raises:
            RolloutFailed: the function raises (`reward_error`), takes too long (`reward_timeout`), or does not return a
                finite number (`reward_invalid`).
        """
        try:
            async with asyncio.timeout(SECONDS) as limit:
                value = await asyncio.to_thread(self._called, self._arguments(inputs))
                if inspect.isawaitable(value):
                    value = await value
        except RolloutFailed:
            raise
        except Exception as error:  # a TimeoutError may also be the function's, such as a web request's
            if limit.expired():
                raise RolloutFailed("reward_timeout", f"no grade within {SECONDS:g} s") from None
            raise RolloutFailed("reward_error", said(error)) from error
        if not self._takes_list:
            return {self.part: finite_reward(value)}
        if not hasattr(value, "__len__") or not hasattr(value, "__iter__") or len(value) != 1:
            raise RolloutFailed("reward_invalid", f"a list of one number was expected, not {value!r:.80}")
        (only,) = value
        return {} if only is None else {self.part: finite_reward(only)}

    def close(self) -> None:
        """Do nothing: the function lives as long as this process."""

    def _called(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self._function(**arguments)
        except StopIteration as error:  # of a bare next(); a future that a thread sets cannot hold it, and never ends
            raise RolloutFailed("reward_error", said(error)) from error

    def _arguments(self, inputs: RewardInput) -> dict[str, Any]:
        if not self._takes_list:
            return {name: getattr(inputs, name) for name in self._columns}
        completion: Any = inputs.completion
        if self._chat:
            completion = [{"role": "assistant", "content": completion}]
        every = {**inputs.row, "prompts": inputs.row.get("prompt"), "completions": completion}
        return {name: [every.get(name)] for name in self._columns}


def _accepted(function: Callable[..., Any], name: str, columns: Collection[str]) -> tuple[tuple[str, ...], bool]:
    """Return the names of the arguments to pass, and True if the function has TRL's signature.

    Raises:
        ConfigurationError: see `CallableReward`.
    """
    names = {each.name for each in parameters_of(function, name, SIGNATURES)}
    takes_list = "completions" in names
    if takes_list == ("completion" in names):
        raise ConfigurationError(
            f"{name!r} names {'both' if takes_list else 'neither'} of completion and completions",
            code="completion_not_taken",
            remedy=SIGNATURES,
        )
    offered = ["completions", "prompts", *sorted(set(columns) - {"prompt", "prompts", "completions"})]
    accepted = accepted_arguments(function, name, offered if takes_list else ARGUMENTS, SIGNATURES)
    bound = function.keywords if isinstance(function, partial) else {}
    return tuple(each for each in accepted if each not in bound), takes_list


def _without_partial(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _source(function: Any) -> bytes:
    """Return the source text of a function or of an object's class, or its compiled code where there is no text.

    It is followed by the arguments that `partial` has bound, if they are JSON.
    """
    bound = b""
    if isinstance(function, partial):
        with suppress(TypeError, ValueError):  # other values may print differently in the next run
            bound = json.dumps([function.args, function.keywords], sort_keys=True).encode()
    return _source_text(_without_partial(inspect.unwrap(function))) + bound


def _source_text(plain: Any) -> bytes:
    if not (inspect.isroutine(plain) or inspect.isclass(plain)):
        plain = type(plain)
    try:
        return inspect.getsource(plain).encode()
    except (OSError, TypeError):
        code = getattr(plain, "__code__", None)
        return f"{plain.__module__}.{plain.__qualname__}".encode() if code is None else marshal.dumps(code)
