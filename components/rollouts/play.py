"""One episode, played by the policy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np

from armature.components.contracts.checks import EnvironmentInfo, environment_info, plain_text
from armature.components.contracts.episodes import Environment, Outcome, Task
from armature.components.contracts.failures import RolloutFailed
from armature.components.contracts.rollouts import Trajectory, Turn
from armature.components.environments.guarded import GuardedEpisode
from armature.components.inference.client import Completion, GenerationFailure, ReservedToken, Sampling
from armature.components.rollouts.conversation import Conversation, SharedImages
from armature.components.rollouts.generator import Generator


@dataclass(frozen=True, slots=True)
class RolloutId:
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
class EpisodeRunner:
    """Plays episodes of `environment` with `pool` as the policy; `seed` is the run's."""

    environment: Environment
    pool: Generator
    images: SharedImages
    sampling: Sampling
    seed: int
    environment_timeout: float

    async def play(self, task: Task, place: RolloutId) -> Trajectory:
        """
        Raises:
            RolloutFailed: whatever concerns this rollout alone.
        """
        episode = GuardedEpisode(self.environment, task, self.environment_timeout)
        try:
            turns, done = await self._turns(episode, place)
        except BaseException:
            with suppress(RolloutFailed):  # the first failure is the one to report
                await episode.close()
            raise
        await episode.close()
        return Trajectory(
            place.trajectory_id,
            place.group_id,
            self.facts.name,
            task.task_id,
            task.split,
            tuple(turns),
            truncated=not done,
        )

    @cached_property
    def facts(self) -> EnvironmentInfo:
        """Raises ConfigurationError where the environment lacks a required attribute."""
        return environment_info(self.environment)

    async def _turns(self, episode: GuardedEpisode, place: RolloutId) -> tuple[list[Turn], bool]:
        conversation = Conversation(self.facts.system_prompt, self.images, self.facts.dialogue)
        turns: list[Turn] = []
        clock = time.perf_counter()
        observation = await episode.reset()
        environment_seconds = time.perf_counter() - clock
        for index in range(self.facts.max_turns):
            await conversation.observe(observation)
            clock = time.perf_counter()
            try:
                generated = await self._generate(conversation, place.request_seed(self.seed, index))
            except RolloutFailed as failed:
                if turns and (failed.reason == "prompt_too_long" or _policy_wrote(failed, turns)):
                    break  # the policy has spoiled its own context: it keeps what it has earned, as when out of turns
                raise
            generate_seconds = time.perf_counter() - clock
            conversation.answer(generated.text)
            clock = time.perf_counter()
            outcome = await episode.step(generated.text)
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
                    reward=_reward(outcome, episode.reward_weights),
                    reward_parts=outcome.reward_parts,
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

    async def _generate(self, conversation: Conversation, seed: int) -> Completion:
        try:
            generated = await self.pool.complete(conversation.messages, self.sampling, seed)
        except GenerationFailure as failure:
            raise RolloutFailed(failure.reason, str(failure)) from failure
        logprobs, tokens = generated.logprobs, generated.token_ids
        if tokens.size == 0 or logprobs.size != tokens.size or not np.isfinite(logprobs).all():
            raise RolloutFailed("bad_logprobs", f"{tokens.size} tokens have the log-probs {logprobs[:8]}")
        plain_text("the completion", generated.text)
        plain_text("the finish reason", generated.finish_reason)
        return generated


def _policy_wrote(failed: RolloutFailed, turns: list[Turn]) -> bool:
    """Check for a reserved token in the prompt that an answer of the policy has spelled."""
    cause = failed.__cause__
    return isinstance(cause, ReservedToken) and any(cause.token in turn.completion for turn in turns)


def _reward(outcome: Outcome, weights: Mapping[str, float]) -> float:
    unknown = set(outcome.reward_parts) - set(weights)
    if unknown:
        raise RolloutFailed("bad_reward", f"no weight for {', '.join(sorted(unknown))}")
    reward = float(sum(weights[part] * value for part, value in outcome.reward_parts.items()))
    if not math.isfinite(reward):
        raise RolloutFailed("bad_reward", f"reward parts {dict(outcome.reward_parts)}")
    return reward
