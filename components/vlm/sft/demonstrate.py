"""Demonstrations: prepared answers, played in the real environment as if a policy had given them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from armature.components.artifacts.images import ImageStore, decode
from armature.components.artifacts.videos import Video, decode_video
from armature.components.contracts.episodes import DemonstrationEnvironment, Environment, Task
from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import Failure, GenerateOutputs, TokenIds, Trajectory
from armature.components.inference.client import Completion, GenerationFailure, Message, Sampling
from armature.components.inference.settings import EvaluationSamplingSettings
from armature.components.inference.tool_calls import ToolFormat, tool_format_of
from armature.components.models.adapters.collate import Shown, video_arguments
from armature.components.rollouts.collect import allow_episodes
from armature.components.rollouts.play import EpisodeRunner, RolloutId, SharedImages


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one core per thread within this block.

    The operations of an image processor are too small for several cores; on a busy machine two cores make them ten
    times as slow.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PromptWriter:
    """Turns chat messages into the token ids that a vLLM server would return for them.

    It uses the family's chat template and processor as vLLM's chat route does. The tokenizer adds no special tokens: a
    beginning-of-sequence token comes from the template, or from a processor that always writes one (it is only used for
    prompts with images). It can be used from several threads.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._lock = Lock()  # a fast tokenizer raises an error when two threads use it at once

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of the model's tool calls."""
        return tool_format_of(self._processor.chat_template or "")

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> TokenIds:
        """Return the prompt (P,) of the next assistant message, with image placeholders expanded.

        `tools` are schemas that the chat template renders.
        """
        parts = [part for message in messages for part in _parts(message)]
        shown: list[Shown] = [decode(_encoded(part)) for part in parts if part["type"] == "image_url"]
        shown += [decode_video(_encoded(part)) for part in parts if part["type"] == "video_url"]
        chat = [{**message, "content": [_for_template(part) for part in _parts(message)]} for message in messages]
        return self.encode(self.render(chat, list(tools) or None), shown)

    def render(self, chat: Sequence[Mapping[str, Any]], tools: Any = None, generate: bool = True) -> str:
        """Return the text that the template makes of messages, with the beginning of an answer if `generate`."""
        with self._lock:
            text: str = self._processor.apply_chat_template(
                list(chat), tools=tools, add_generation_prompt=generate, tokenize=False
            )
        return text

    def encode(self, text: str, shown: Sequence[Shown] = ()) -> TokenIds:
        """Return a text as tokens (P,), with the placeholders of images and videos, in order, expanded."""
        arguments: dict[str, Any] = {}
        if images := [each for each in shown if not isinstance(each, Video)]:
            arguments["images"] = [images]
        if videos := [each for each in shown if isinstance(each, Video)]:
            arguments |= video_arguments(videos)
        with self._lock:
            if arguments:
                ids = self._processor(text=[text], add_special_tokens=False, **arguments)["input_ids"][0]
            else:
                ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def answer(self, text: str) -> TokenIds:
        """Return the tokens (C,) of a completion that says `text` and stops, with the end-of-sequence token."""
        tokenizer = self._processor.tokenizer
        with self._lock:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _for_template(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return part if part["type"] == "text" else {"type": part["type"].removesuffix("_url")}


def _encoded(part: Mapping[str, Any]) -> EncodedImage:
    return EncodedImage.from_url(part[part["type"]]["url"])


_UNUSED_SAMPLING = EvaluationSamplingSettings(temperature=0.0, max_tokens=1)
"""Sampling settings that an episode needs but a demonstrator ignores."""


class Demonstrator:
    """A policy that gives prepared answers, one per turn; each token has probability 1."""

    def __init__(self, answers: Sequence[str], writer: PromptWriter) -> None:
        self._answers, self._writer = deque(answers), writer

    @property
    def tool_format(self) -> ToolFormat:
        return self._writer.tool_format

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Completion:
        """Return the next prepared answer as a completion.

        Raises:
            GenerationFailure: all answers are used up, but the episode continues.
        """
        if not self._answers:
            raise GenerationFailure("the demonstration's answers end before the episode", reason="goal_not_reached")
        text = self._answers.popleft()
        prompt = await asyncio.to_thread(self._writer.prompt, messages, tools)
        tokens = self._writer.answer(text)
        certain = np.zeros(len(tokens), dtype=np.float32)
        return Completion(prompt, tokens, certain, text, "stop", 0, "expert", 0.0)


def expert(environment: Environment) -> DemonstrationEnvironment:
    """Return `environment` if it can demonstrate its tasks.

    Raises:
        ConfigurationError: it does not have a method `demonstration`.
    """
    if not hasattr(environment, "demonstration"):
        raise ConfigurationError(
            f"environment {environment.name!r} has no demonstrations for a warm start",
            code="demonstrator_missing",
            where="warm_start",
            remedy="remove this section from the recipe, or add a method demonstration(task) to the environment",
        )
    return environment  # type: ignore[return-value]


async def demonstrate(
    environment: DemonstrationEnvironment,
    tasks: Sequence[Task],
    success_reward: float,
    writer: PromptWriter,
    images: ImageStore,
    machine: Machine,
    report: Callable[[int], None],
) -> GenerateOutputs:
    """Play one demonstration of each task, in the order of the tasks.

    A demonstration that misses its goal becomes a failure.

    Args:
        success_reward: the smallest reward with which a demonstration has reached its goal.
        report: called with the number of finished demonstrations after each one.
    """
    allow_episodes(machine.limits.max_concurrent)
    shared = SharedImages(images)
    limit = asyncio.Semaphore(machine.limits.max_concurrent)
    finished = 0

    async def play(task: Task, place: RolloutId) -> Trajectory | Failure:
        nonlocal finished
        async with limit:
            try:
                result = await _played(task, place)
            except RolloutFailed as failed:
                result = Failure(place.trajectory_id, place.group_id, task.task_id, failed.reason, failed.detail)
        finished += 1
        report(finished)
        return result

    async def _played(task: Task, place: RolloutId) -> Trajectory | Failure:
        try:
            answers = await asyncio.to_thread(environment.demonstration, task)
        except Exception as error:  # an environment is other people's code and may raise anything
            raise RolloutFailed("environment_error", f"demonstration: {type(error).__name__}: {error}") from error
        if not answers:
            raise RolloutFailed("no_demonstration", "the demonstrator has no answers for this task")
        policy = Demonstrator(answers, writer)
        player = EpisodeRunner(environment, policy, shared, _UNUSED_SAMPLING, 0, machine.limits.environment_timeout)
        trajectory = await player.play(task, place)
        if trajectory.truncated or not trajectory.earns(success_reward):
            ending = "ran out of turns" if trajectory.truncated else "ended"
            raise RolloutFailed(
                "goal_not_reached", f"{ending} after {len(trajectory.turns)} turns with reward {trajectory.reward:g}"
            )
        return trajectory

    results = await asyncio.gather(*(play(task, RolloutId(0, index, 0)) for index, task in enumerate(tasks)))
    return GenerateOutputs(
        tuple(result for result in results if isinstance(result, Trajectory)),
        tuple(result for result in results if isinstance(result, Failure)),
    )
