"""One episode, played by the policy."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from types import NoneType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from components.contracts.episodes import Environment, Episode, Observation, Outcome, Task
from components.contracts.rollouts import Trajectory, Turn
from components.inference.client import Completion, GenerationFailure
from components.rollouts.conversation import Conversation, SharedImages
from components.rollouts.failures import RolloutFailed
from components.rollouts.generator import Generator

if TYPE_CHECKING:
    from components.inference.settings import EvaluationSamplingSettings, SamplingSettings

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Place:
    """Which rollout of the run this is: member `member` of group `group` in step `step`."""

    step: int
    group: int
    member: int

    @property
    def group_id(self) -> str:
        return f"{self.step:06d}-{self.group:04d}"

    @property
    def trajectory_id(self) -> str:
        return f"{self.group_id}-{self.member:02d}"

    def request_seed(self, seed: int, turn: int) -> int:
        """62 bits that depend on the run's `seed`, on the group and on the turn, plus the member.

        Seeds of a group follow one another, so that the pool may ask for its members in one request.
        """
        text = f"{seed}/{self.step}/{self.group}/{turn}"
        return (int.from_bytes(sha256(text.encode()).digest()[:8]) >> 2) + self.member


@dataclass(frozen=True)
class Player:
    """Plays episodes of `environment` with `pool` as the policy; `seed` is the run's."""

    environment: Environment
    pool: Generator
    images: SharedImages
    sampling: SamplingSettings | EvaluationSamplingSettings
    seed: int
    environment_timeout: float

    async def play(self, task: Task, place: Place) -> Trajectory:
        """
        Raises:
            RolloutFailed: whatever concerns this rollout alone.
        """
        with _foreign("episode"):
            episode = self.environment.episode(task)
        try:
            turns, done = await self._turns(episode, place)
        except BaseException:
            with suppress(RolloutFailed):  # the first failure is the one to report
                await self._ask(episode.close, NoneType)
            raise
        await self._ask(episode.close, NoneType)
        return Trajectory(
            place.trajectory_id,
            place.group_id,
            self.environment.name,
            task.task_id,
            task.split,
            tuple(turns),
            truncated=not done,
        )

    async def _turns(self, episode: Episode, place: Place) -> tuple[list[Turn], bool]:
        conversation = Conversation(self.environment.system_prompt, self.images, self.environment.dialogue)
        turns: list[Turn] = []
        clock = time.perf_counter()
        observation = await self._ask(episode.reset, Observation)
        environment_seconds = time.perf_counter() - clock
        for index in range(self.environment.max_turns):
            await conversation.observe(observation)
            clock = time.perf_counter()
            generated = await self._generate(conversation, place.request_seed(self.seed, index))
            generate_seconds = time.perf_counter() - clock
            conversation.answer(generated.text)
            clock = time.perf_counter()
            outcome = await self._ask(episode.step, Outcome, generated.text)
            environment_seconds += time.perf_counter() - clock
            turns.append(
                Turn(
                    index=index,
                    prompt_token_ids=generated.prompt_token_ids,
                    completion_token_ids=generated.token_ids,
                    completion_logprobs=generated.logprobs,
                    finish_reason=generated.finish_reason,
                    policy_version=generated.policy_version,
                    images=conversation.images,
                    messages=conversation.unread(),
                    completion=generated.text,
                    reward=self._reward(outcome),
                    reward_parts=dict(outcome.reward_parts),
                    anchor_key=observation.anchor_key,
                    admissible_key=observation.admissible_key,
                    action_defect=outcome.action_defect,
                    generate_seconds=generate_seconds,
                    environment_seconds=environment_seconds,
                )
            )
            if outcome.observation is None:
                return turns, True
            observation, environment_seconds = outcome.observation, 0.0
        return turns, False

    async def _ask(self, method: Callable[..., Awaitable[object]], kind: type[ResultT], *arguments: str) -> ResultT:
        """Call the episode, which has `environment_timeout` seconds to give a `kind`."""
        with _foreign(method.__name__):
            try:
                async with asyncio.timeout(self.environment_timeout) as limit:
                    result = await method(*arguments)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                detail = f"{method.__name__} took more than {self.environment_timeout:g} s"
                raise RolloutFailed("environment_timeout", detail) from error
        if not isinstance(result, kind):
            raise RolloutFailed("environment_error", f"{method.__name__} gave {type(result).__name__}")
        return result

    async def _generate(self, conversation: Conversation, seed: int) -> Completion:
        try:
            generated = await self.pool.complete(conversation.messages, self.sampling, seed)
        except GenerationFailure as failure:
            raise RolloutFailed(failure.reason, str(failure)) from failure
        logprobs, tokens = generated.logprobs, generated.token_ids
        if tokens.size == 0 or logprobs.size != tokens.size or not np.isfinite(logprobs).all():
            raise RolloutFailed("bad_logprobs", f"{tokens.size} tokens have the log-probs {logprobs[:8]}")
        return generated

    def _reward(self, outcome: Outcome) -> float:
        weights = self.environment.reward_weights
        unknown = set(outcome.reward_parts) - set(weights)
        if unknown:
            raise RolloutFailed("bad_reward", f"no weight for {', '.join(sorted(unknown))}")
        with _foreign("reward_parts"):
            reward = float(sum(weights[part] * value for part, value in outcome.reward_parts.items()))
        if not math.isfinite(reward):
            raise RolloutFailed("bad_reward", f"reward parts {dict(outcome.reward_parts)}")
        return reward


@contextmanager
def _foreign(what: str) -> Iterator[None]:
    """An environment is code that we did not write: whatever it raises ends its own episode only."""
    try:
        yield
    except RolloutFailed:
        raise
    except Exception as error:
        raise RolloutFailed("environment_error", f"{what}: {type(error).__name__}: {error}") from error
