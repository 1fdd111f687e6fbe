"""Demonstrations: a demonstrator's answers, played in the real environment like those of any policy."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image

from armature.components.artifacts.images import ImageStore, decode
from armature.components.contracts.episodes import DemonstrationEnvironment, Environment, Task
from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import Failure, GenerateOutputs, TokenIds, Trajectory
from armature.components.inference.client import Completion, GenerationFailure, Message, Sampling
from armature.components.inference.settings import EvaluationSamplingSettings
from armature.components.rollouts.collect import allow_episodes
from armature.components.rollouts.play import EpisodeRunner, RolloutId, SharedImages

# Chat messages as the token ids that a model server would return for them.


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, threads that are started compute with one core: an image processor's steps are too small for more,
    and on a busy machine ten times as slow with two.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PromptWriter:
    """The family's chat template and processor, used as vLLM's chat route uses them.

    The tokenizer adds no special tokens of its own: a beginning-of-sequence token comes from the template, or from a
    processor that always writes one, which prompts without images do not pass. Several threads may ask.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._lock = Lock()  # a fast tokenizer refuses to be used by two threads at once

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> TokenIds:
        """(P,) the prompt of the next assistant message, image placeholders expanded."""
        images = [_image(part) for message in messages for part in _parts(message) if _is_image(part)]
        chat = [{**message, "content": [_for_template(part) for part in _parts(message)]} for message in messages]
        with self._lock:
            text = self._processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            if images:
                ids = self._processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
            else:
                ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def answer(self, text: str) -> TokenIds:
        """(C,) what a policy samples that says `text` and stops: its tokens and the end-of-sequence token."""
        tokenizer = self._processor.tokenizer
        with self._lock:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_image(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image_url"


def _for_template(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "image"} if _is_image(part) else part


def _image(part: Mapping[str, Any]) -> Image.Image:
    return decode(EncodedImage.from_url(part["image_url"]["url"]))


_NOTHING_IS_SAMPLED = EvaluationSamplingSettings(temperature=0.0, max_tokens=1)


class Demonstrator:
    """A policy that says prepared answers, one a turn, each token with probability 1."""

    def __init__(self, answers: Sequence[str], writer: PromptWriter) -> None:
        self._answers, self._writer = deque(answers), writer

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        """
        Raises:
            GenerationFailure: all answers are said, and the episode continues.
        """
        if not self._answers:
            raise GenerationFailure("the answers end before the episode does", reason="goal_not_reached")
        text = self._answers.popleft()
        prompt = await asyncio.to_thread(self._writer.prompt, messages)
        tokens = self._writer.answer(text)
        certain = np.zeros(len(tokens), dtype=np.float32)
        return Completion(prompt, tokens, certain, text, "stop", 0, "expert", 0.0)


def expert(environment: Environment) -> DemonstrationEnvironment:
    """`environment` itself, if it knows how its tasks are solved.

    Raises:
        ConfigurationError: it does not.
    """
    if not hasattr(environment, "demonstration"):
        raise ConfigurationError(
            f"environment {environment.name!r} gives no demonstrations, so there is nothing to start from",
            code="demonstrator_missing",
            where="warm_start",
            remedy="take the section out of the recipe, or give the environment a method demonstration(task)",
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
    """One demonstration of each task, in their order; what does not reach its goal is a failure.

    `report` is told how many are finished.
    """
    allow_episodes(machine.max_concurrent)
    shared = SharedImages(images)
    limit = asyncio.Semaphore(machine.max_concurrent)
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
        except Exception as error:  # an environment is code that we did not write
            raise RolloutFailed("environment_error", f"demonstration: {type(error).__name__}: {error}") from error
        if not answers:
            raise RolloutFailed("no_demonstration", "the demonstrator knows no answers")
        policy = Demonstrator(answers, writer)
        player = EpisodeRunner(environment, policy, shared, _NOTHING_IS_SAMPLED, 0, machine.environment_timeout)
        trajectory = await player.play(task, place)
        if trajectory.truncated or not trajectory.earns(success_reward):
            ending = "ran out of turns" if trajectory.truncated else "ended"
            raise RolloutFailed(
                "goal_not_reached", f"{ending} after {len(trajectory.turns)} turns with {trajectory.reward:g}"
            )
        return trajectory

    results = await asyncio.gather(*(play(task, RolloutId(0, index, 0)) for index, task in enumerate(tasks)))
    return GenerateOutputs(
        tuple(result for result in results if isinstance(result, Trajectory)),
        tuple(result for result in results if isinstance(result, Failure)),
    )
