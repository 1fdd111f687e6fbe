"""Play one episode with the policy: show observations, sample answers, step the environment, record turns."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.checks import EnvironmentInfo, environment_info, plain_text
from armature.components.contracts.episodes import (
    ChatAnswer,
    ChatRequest,
    EarlierMessage,
    Environment,
    Observation,
    Outcome,
    Task,
)
from armature.components.contracts.errors import DataError, RolloutFailed
from armature.components.contracts.images import VIDEO, EncodedImage, ImageRef
from armature.components.contracts.rollouts import Trajectory, Turn
from armature.components.contracts.tool_calls import CalledTool, ToolCall, ToolResult, Tools
from armature.components.environments.guarded import GuardedEpisode
from armature.components.environments.mixture import EnvironmentMixture
from armature.components.inference.client import Completion, GenerationFailure, Message, ReservedToken, Sampling
from armature.components.inference.tool_calls import ToolFormat


class Generator(Protocol):
    """A source of answers to chat messages: the server pool, or a scripted policy."""

    @property
    def tool_format(self) -> ToolFormat:
        """The format of the model's tool calls. It is read for environments with tools only."""

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Completion:
        """Sample one assistant message after `messages`. `tools` are schemas that the chat template renders.

        The members of a group call this at the same time with consecutive seeds. If their messages are equal, one
        request to a server can sample for all of them.

        Raises:
            GenerationFailure: this request cannot be answered; others can.
        """


# --- The chat that a server receives; its images are the bytes in the image store ---


class SharedImages:
    """Store each distinct image once, and cache its data URL for all episodes that show it."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._known: dict[tuple[str, str], asyncio.Task[tuple[ImageRef, str]]] = {}

    async def add(self, image: EncodedImage) -> tuple[ImageRef, str]:
        """Store an image and return its reference and its data URL.

        Raises:
            RolloutFailed: `bad_image`: the image is invalid.
        """
        key = (image.sha256, image.media_type)
        if key not in self._known:
            self._known[key] = asyncio.create_task(asyncio.to_thread(self._put, image))
        try:
            return await self._known[key]
        except DataError as error:
            raise RolloutFailed("bad_image", error.what) from error

    def read(self, refs: Sequence[ImageRef]) -> list[EncodedImage]:
        """Return stored images."""
        return [EncodedImage(self._store.read(ref), ref.media_type) for ref in refs]

    def _put(self, image: EncodedImage) -> tuple[ImageRef, str]:
        ref = self._store.put(image)
        return ref, EncodedImage(self._store.read(ref), ref.media_type).url


class Conversation:
    """The chat of one episode.

    Attributes:
        messages: chat messages for the server.
        images: the images in `messages`, in order of appearance.

    With `dialogue`, the chat grows with every turn; without it, each observation replaces the earlier turns, and
    results of tools between them. `instruction` is added to the system message, or is one.
    """

    def __init__(self, system_prompt: str | None, shared: SharedImages, dialogue: bool, instruction: str = "") -> None:
        self._shared, self._dialogue, self._instruction = shared, dialogue, instruction
        self._beginning = 0 if system_prompt is None else 1
        self._unread: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.images: tuple[ImageRef, ...] = ()
        if system_prompt is not None:
            self._instruct(system_prompt)

    def _instruct(self, text: str) -> None:
        content = "\n\n".join(filter(None, [text, self._instruction]))
        self._append({"role": "system", "content": content})

    def _append(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self._unread.append(message)

    async def replace(self, request: ChatRequest, form: ToolFormat) -> None:
        """Replace the chat by a request of an agent program. Only messages that were not there before are unread.

        Raises:
            RolloutFailed: as in `observe`.
        """
        before, self.messages, self.images, self._unread = self.messages, [], (), []
        self._instruction = form.instruction(request.tools) if request.tools else ""
        results: list[tuple[str, tuple[str | EncodedImage, ...]]] = []
        if self._instruction and request.messages[0].role != "system":
            self._instruct("")
        for message, following in zip(request.messages, [*request.messages[1:], None], strict=True):
            if message.role != "tool":
                await self._add(message)
                continue
            results.append((message.name, message.content))
            if following is None or following.role != "tool":
                await self.show_results(form, results)
                results = []
        pairs = enumerate(zip(before, self.messages, strict=False))
        del self._unread[: next((number for number, (old, new) in pairs if old != new), len(before))]

    async def observe(self, observation: Observation) -> None:
        """Append an observation that `GuardedEpisode` has validated.

        Raises:
            RolloutFailed: `bad_image` if an image is invalid, or `environment_error` if a system message is not
                the first message.
        """
        if not self._dialogue:
            del self.messages[self._beginning :]
            self.images = ()
        if self._instruction and not self.messages and not any(one.role == "system" for one in observation.earlier[:1]):
            self._instruct("")
            self._beginning = 1
        for message in observation.earlier:
            await self._add(message)
        await self._show(observation.content)

    async def _add(self, message: EarlierMessage) -> None:
        if message.role == "user":
            await self._show(message.content)
        elif message.role == "system":
            if self.messages:
                raise RolloutFailed("environment_error", "a system message is not the first message")
            self._instruct("".join(map(str, message.content)))
        else:
            self._append({"role": message.role, "content": "".join(map(str, message.content))})

    async def show_results(
        self, form: ToolFormat, results: Sequence[tuple[str, tuple[str | EncodedImage, ...]]]
    ) -> None:
        """Append the results of the calls in the policy's answer, each with the name of its tool, in order.

        Raises:
            RolloutFailed: `bad_image` if an image is invalid.
        """
        user: list[str | EncodedImage] = []
        for number, (name, parts) in enumerate(results):
            content = [form.shown(part) if isinstance(part, str) else part for part in parts]
            if form.renders_results:
                entries = {"tool_call_id": f"call_{number}", "name": name or "unknown"}
                await self._show(tuple(content), "tool", entries)
            else:
                user += ["<tool_response>\n", *content, "\n</tool_response>", "\n" * (number + 1 < len(results))]
        if user:
            await self._show(tuple(filter(None, user)))

    async def _show(
        self,
        content: tuple[str | EncodedImage, ...],
        role: str = "user",
        entries: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        sent: list[dict[str, Any]] = []
        shown: list[dict[str, Any]] = []
        for part in content:
            if isinstance(part, str):
                sent.append({"type": "text", "text": part})
                shown.append(sent[-1])
            else:
                ref, url = await self._shared.add(part)
                self.images += (ref,)
                kind = "video_url" if ref.media_type == VIDEO else "image_url"
                sent.append({"type": kind, kind: {"url": url}})
                shown.append({"type": "image", "sha256": ref.sha256})
        self.messages.append({"role": role, "content": sent, **entries})
        self._unread.append({"role": role, "content": shown})

    def answer(self, text: str) -> None:
        """Append the policy's answer to the chat."""
        self.messages.append({"role": "assistant", "content": text})

    def unread(self) -> str:
        """Return the messages that were added since the last call, without the policy's answers, as JSON for display.
        Images are replaced by their SHA-256."""
        unread, self._unread = self._unread, []
        return json.dumps(unread, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class RolloutId:
    """The identity of a rollout within its run: member `member` of group `group` in step `step`.

    Example:
        >>> RolloutId(step=3, group=1, member=0).trajectory_id
        '000003-0001-00'
    """

    step: int
    group: int
    member: int

    @classmethod
    def parse(cls, trajectory_id: str) -> RolloutId:
        """Return the identity with this `trajectory_id`.

        Raises:
            ValueError: it is not the id of a trajectory.
        """
        step, group, member = map(int, trajectory_id.split("-"))
        return cls(step, group, member)

    @property
    def group_id(self) -> str:
        """Id of the rollout's group, unique within the run."""
        return f"{self.step:06d}-{self.group:04d}"

    @property
    def trajectory_id(self) -> str:
        """Id of the rollout's trajectory, unique within the run."""
        return f"{self.group_id}-{self.member:02d}"

    def request_seed(self, seed: int, turn: int) -> int:
        """Return the seed of the request for turn `turn`. `seed` is the seed of the run.

        It is a 62-bit hash of the run's seed, the step, the group and the turn, plus the number of the member. So the
        members of a group have consecutive seeds, and the pool can merge their requests into one.
        """
        text = f"{seed}/{self.step}/{self.group}/{turn}"
        return (int.from_bytes(sha256(text.encode()).digest()[:8]) >> 2) + self.member


@dataclass(frozen=True)
class EpisodeRunner:
    """Play episodes of `environment` with `pool` as the policy. `seed` is the seed of the run."""

    environment: Environment
    pool: Generator
    images: SharedImages
    sampling: Sampling
    seed: int
    environment_timeout: float

    async def play(self, task: Task, place: RolloutId) -> Trajectory:
        """Play one episode and return its trajectory.

        Raises:
            RolloutFailed: this rollout failed; others are not affected.
        """
        facts, environment, own = self._played(task)
        episode = GuardedEpisode(environment, own, self.environment_timeout)
        try:
            turns, done = await self._turns(facts, episode, place, getattr(environment, "tools", None))
        except BaseException:
            with suppress(RolloutFailed):  # the first failure is the one to report
                await episode.close()
            raise
        await episode.close()
        return Trajectory(
            place.trajectory_id,
            place.group_id,
            facts.name,
            task.task_id,
            task.split,
            tuple(turns),
            truncated=not done,
        )

    def _played(self, task: Task) -> tuple[EnvironmentInfo, Environment, Task]:
        """Return the environment that plays `task`, its attributes, and the task as that environment lists it.

        For a mixture this is one of its environments, under the name that it has there.

        Raises:
            ConfigurationError: the environment lacks a required attribute.
        """
        if not isinstance(self.environment, EnvironmentMixture):
            return environment_info(self.environment), self.environment, task
        name, environment, own = self.environment.part_of(task)
        return replace(environment_info(environment), name=name), environment, own

    async def _turns(
        self, facts: EnvironmentInfo, episode: GuardedEpisode, place: RolloutId, tools: Tools | None
    ) -> tuple[list[Turn], bool]:
        schemas = () if tools is None else tools.schemas
        form = ToolFormat() if tools is None else self.pool.tool_format
        instruction = form.instruction(schemas) if schemas else ""
        conversation = Conversation(facts.system_prompt, self.images, facts.dialogue, instruction)
        offered = schemas if form.renders_tools else ()
        turns: list[Turn] = []
        calls_left, steps = 0 if tools is None else tools.max_calls, 0
        clock = time.perf_counter()
        first = await episode.reset()
        environment_seconds = time.perf_counter() - clock
        if first.request is not None:
            return await self._answered(episode, place, first.request, facts.max_turns, environment_seconds)
        observation: Observation | None = first
        while steps < facts.max_turns:
            if observation is not None:
                await conversation.observe(observation)
            clock = time.perf_counter()
            try:
                generated = await self._generate(conversation, place.request_seed(self.seed, len(turns)), offered)
            except RolloutFailed as failed:
                if turns and (failed.reason == "prompt_too_long" or _policy_wrote(failed, turns)):
                    # The policy itself has filled or spoiled its context. End the episode and keep its rewards, as if
                    # it were out of turns.
                    break
                raise
            generate_seconds = time.perf_counter() - clock
            conversation.answer(generated.text)
            calls = form.calls(generated.text, schemas) if calls_left else []
            clock = time.perf_counter()
            if calls:
                assert tools is not None
                outcome = Outcome(None)
                results = await self._called(tools, calls, calls_left, conversation.images)
                calls_left = max(0, calls_left - len(calls))
            else:
                steps, results = steps + 1, []
                outcome = await episode.step(generated.text)
            environment_seconds += time.perf_counter() - clock
            shown = observation or Observation(())
            called = [CalledTool(call.name[:80], result.status) for call, result in results]
            seconds = generate_seconds, environment_seconds
            reward = _reward(outcome, episode.reward_weights)
            turns.append(_turn(len(turns), conversation, generated, shown, outcome, reward, seconds, called))
            environment_seconds = 0.0
            if calls:
                observation = None
                await conversation.show_results(form, [(call.name, result.content) for call, result in results])
            elif outcome.observation is None:
                return turns, True
            else:
                observation = outcome.observation
        return turns, False

    async def _answered(
        self, episode: GuardedEpisode, place: RolloutId, request: ChatRequest, most: int, environment_seconds: float
    ) -> tuple[list[Turn], bool]:
        """Answer the requests of an agent program until it ends, or `most` of them."""
        conversation = Conversation(None, self.images, dialogue=True)
        turns: list[Turn] = []
        for number in range(most):
            with_tools = request.tools or any(message.role == "tool" for message in request.messages)
            form = self.pool.tool_format if with_tools else ToolFormat()
            generated, calls, refused = None, list[tuple[int, ToolCall]](), None
            clock = time.perf_counter()
            try:
                await conversation.replace(request, form)
                offered = request.tools if form.renders_tools else ()
                generated = await self._generate(conversation, place.request_seed(self.seed, number), offered)
            except RolloutFailed as failed:
                if failed.reason not in _REFUSED:
                    raise
                refused = failed
            generate_seconds = time.perf_counter() - clock
            if generated is None:
                answer = ChatAnswer("", refusal=str(refused))
            else:
                conversation.answer(generated.text)
                calls = form.located(generated.text, request.tools) if request.tools else []
                answer = _chat_answer(generated, calls)
            clock = time.perf_counter()
            outcome = await episode.answer(answer)
            environment_seconds += time.perf_counter() - clock
            reward = _reward(outcome, episode.reward_weights)
            if generated is not None:
                called = [CalledTool(call.name[:80], "malformed" if call.defect else "program") for _, call in calls]
                seconds = generate_seconds, environment_seconds
                shown = Observation(())
                turns.append(_turn(len(turns), conversation, generated, shown, outcome, reward, seconds, called))
                environment_seconds = 0.0
            elif outcome.done:
                if not turns:
                    assert refused is not None
                    raise refused
                turns[-1] = replace(turns[-1], reward=reward, reward_parts=outcome.reward_parts)
            if outcome.observation is None:
                return turns, True
            assert outcome.observation.request is not None
            request = outcome.observation.request
        return turns, False

    async def _called(
        self, tools: Tools, calls: Sequence[ToolCall], calls_left: int, shown: Sequence[ImageRef]
    ) -> list[tuple[ToolCall, ToolResult]]:
        """Run the calls of a turn, one after the other. They see the images that were shown before the turn."""
        images = await asyncio.to_thread(self.images.read, shown)
        none_left = ToolResult("no_calls_left", ("Error: no calls are left",))
        return [
            (call, await tools.call(call, images) if number < calls_left else none_left)
            for number, call in enumerate(calls)
        ]

    async def _generate(self, conversation: Conversation, seed: int, tools: Sequence[Mapping[str, Any]]) -> Completion:
        offered = {"tools": tools} if tools else {}  # scripted policies need not know of tools
        try:
            generated = await self.pool.complete(conversation.messages, self.sampling, seed, **offered)
        except GenerationFailure as failure:
            raise RolloutFailed(failure.reason, str(failure)) from failure
        logprobs, tokens = generated.logprobs, generated.token_ids
        if tokens.size == 0 or logprobs.size != tokens.size or not np.isfinite(logprobs).all():
            raise RolloutFailed("bad_logprobs", f"{tokens.size} tokens have the log-probs {logprobs[:8]}")
        plain_text("the completion", generated.text)
        plain_text("the finish reason", generated.finish_reason)
        return generated


_REFUSED = frozenset({"prompt_too_long", "too_many_images", "request_refused", "reserved_token", "bad_image"})
"""Reasons for which a request of an agent program is refused. It can go on without the answer."""


def _chat_answer(generated: Completion, calls: Sequence[tuple[int, ToolCall]]) -> ChatAnswer:
    """Return a completion as the answer to an agent program. With a malformed call, all of it is text."""
    readable = calls if not any(call.defect for _, call in calls) else ()
    return ChatAnswer(
        generated.text,
        tuple(call for _, call in readable),
        at=readable[0][0] if readable else None,
        finish_reason=generated.finish_reason,
        prompt_tokens=len(generated.prompt_token_ids),
        completion_tokens=len(generated.token_ids),
    )


def _turn(
    index: int,
    conversation: Conversation,
    generated: Completion,
    shown: Observation,
    outcome: Outcome,
    reward: float,
    seconds: tuple[float, float],
    called: Sequence[CalledTool],
) -> Turn:
    """Return the record of a turn. `seconds` are times of the generation and of the environment."""
    return Turn(
        index=index,
        prompt_token_ids=generated.prompt_token_ids,
        completion_token_ids=generated.token_ids,
        completion_logprobs=generated.logprobs,
        finish_reason=generated.finish_reason,
        policy_version=generated.policy_version,
        images=conversation.images,
        messages=conversation.unread(),
        completion=generated.text,
        reward=reward,
        reward_parts=outcome.reward_parts,
        anchor_key=shown.anchor_key,
        admissible_key=shown.admissible_key,
        action_defect=outcome.action_defect,
        generate_seconds=seconds[0],
        environment_seconds=seconds[1],
        experts=generated.experts,
        tool_calls=tuple(called),
    )


def _policy_wrote(failed: RolloutFailed, turns: list[Turn]) -> bool:
    """Return True if the request failed because an earlier answer of the policy contains a reserved token, or called
    for more images than the server accepts."""
    if failed.reason == "too_many_images":
        return any(turn.tool_calls for turn in turns)
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
