"""What an environment is: it lists tasks and plays one episode of a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, Protocol

from armature.components.contracts.images import EncodedImage

Split = Literal["train", "heldout"]
Role = Literal["system", "user", "assistant"]
ActionDefect = Literal["format", "inadmissible"]
"""Why an answer was not an action: it could not be read, or it was read and is not possible here."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. `payload` is JSON; with the environment's settings it determines the episode's start."""

    task_id: str
    split: Split
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EarlierMessage:
    """A message that stands before an observation and that the policy did not write; only a user shows images."""

    role: Role
    content: tuple[str | EncodedImage, ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy is shown: text and images in reading order.

    `admissible_actions` is None where any text is an action. `anchor_key` names the environment's state for
    step-level groups (GiGPO); None where the environment defines no such state. `earlier`: messages before it, such
    as the beginning of a conversation that the policy continues. A system message is the first of an episode, of an
    environment without a system prompt.
    """

    content: tuple[str | EncodedImage, ...]
    admissible_actions: tuple[str, ...] | None = None
    anchor_key: str | None = None
    earlier: tuple[EarlierMessage, ...] = ()

    @property
    def admissible_key(self) -> str | None:
        """Equal exactly where the same actions are admissible, in whatever order; None where any text is one."""
        if self.admissible_actions is None:
            return None
        return sha256("\n".join(sorted(set(self.admissible_actions))).encode(errors="replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action led to. `observation` is None exactly when the episode is done."""

    observation: Observation | None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    action_defect: ActionDefect | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.observation is None


class Episode(Protocol):
    """One episode of one task, played once: reset, then step until done or out of turns, then close."""

    async def reset(self) -> Observation:
        """The first observation."""

    async def step(self, action: str) -> Outcome:
        """What `action` led to: the text that the policy answered with, whatever it is."""

    async def close(self) -> None:
        """Free what the episode holds; called once, also after an error."""


class Environment(Protocol):
    """A family of tasks. The reward of a turn is the sum of `reward_weights[part] * reward_parts[part]`.

    `dialogue`: whether a turn's prompt is the whole conversation so far. If not, it is the system prompt and the
    observation alone, which then holds all of the history that the policy is to see.
    """

    name: str
    system_prompt: str | None
    dialogue: bool
    max_turns: int
    reward_weights: Mapping[str, float]

    def tasks(self, split: Split) -> Iterable[Task]:
        """The tasks of `split`, the same every time."""

    def episode(self, task: Task) -> Episode:
        """A new episode of `task`."""

    def close(self) -> None:
        """End whatever the environment has started, such as processes that play."""


class DemonstrationEnvironment(Environment, Protocol):
    """An environment that knows how its tasks are solved."""

    def demonstration(self, task: Task) -> Sequence[str]:
        """The answers, turn by turn, that solve `task` from its start; empty if it knows none."""
