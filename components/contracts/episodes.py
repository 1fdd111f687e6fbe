"""The protocols of environments, which list tasks, and of episodes, which play one task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, Protocol

from armature.components.contracts.images import EncodedImage
from armature.components.contracts.tool_calls import ToolCall

Split = Literal["train", "heldout"]
Role = Literal["system", "user", "assistant"]
MessageRole = Literal["system", "user", "assistant", "tool"]
ActionDefect = Literal["format", "inadmissible"]
"""The reason why an answer is not a valid action: it cannot be parsed, or the parsed action is not possible now."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `payload` is JSON; together with the environment's settings it determines how an episode starts."""

    task_id: str
    split: Split
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EarlierMessage:
    """A message before an observation. Only messages of the user and of tools may hold images.

    A message of the role tool is the result of a call of the tool `name`; only a `ChatRequest` may have some.
    """

    role: MessageRole
    content: tuple[str | EncodedImage, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of an agent program for a completion: the whole conversation, and schemas of the tools it offers.

    Answers of the policy are in it as sampled, with the text of their tool calls.
    """

    messages: tuple[EarlierMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The policy's answer to a `ChatRequest`.

    `content` is the text before the first of the `calls`, and all of `text` without calls. `refusal` says why there is
    no answer, for example because the conversation is too long.

    Example:
        >>> ChatAnswer("red").content
        'red'
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    at: int | None = None
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusal: str = ""

    @property
    def content(self) -> str:
        """The text before the first call."""
        return self.text[: self.at]


@dataclass(frozen=True, slots=True)
class Observation:
    """The text and images, in reading order, that the policy sees before it acts.

    `admissible_actions` is None if any text is an action. `anchor_key` names the environment's state for
    step-level groups (GiGPO); None if the environment does not define one. `earlier` holds messages before the
    observation, such as the beginning of a conversation that the policy continues. Only the first of them in an
    episode may be a system message, and only if the environment has no system prompt. With a `request`, its messages
    are the whole prompt, `content` only repeats the last of them, and the episode is a `ChatEpisode`.

    Example:
        >>> Observation(("What color is it?",), admissible_actions=("red", "blue")).admissible_actions
        ('red', 'blue')
    """

    content: tuple[str | EncodedImage, ...]
    admissible_actions: tuple[str, ...] | None = None
    anchor_key: str | None = None
    earlier: tuple[EarlierMessage, ...] = ()
    request: ChatRequest | None = None

    @property
    def admissible_key(self) -> str | None:
        """Digest of the set of admissible actions, independent of their order; None if every text is an admissible
        action."""
        if self.admissible_actions is None:
            return None
        return sha256("\n".join(sorted(set(self.admissible_actions))).encode(errors="replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action. `observation` is None exactly when the episode is done."""

    observation: Observation | None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    action_defect: ActionDefect | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """True if the episode has ended."""
        return self.observation is None


class Episode(Protocol):
    """One episode of one task, played once: call reset, then step until done or out of turns, then close."""

    async def reset(self) -> Observation:
        """Return the first observation."""

    async def step(self, action: str) -> Outcome:
        """Apply `action` and return its outcome. `action` is the policy's answer and may be any text."""

    async def close(self) -> None:
        """Free the episode's resources. It is called once, also after an error."""


class ChatEpisode(Episode, Protocol):
    """An episode whose observations have a `request`. `answer` is called in place of `step`."""

    async def answer(self, answer: ChatAnswer) -> Outcome:
        """Answer the request of the last observation and return the outcome."""


class Environment(Protocol):
    """A family of tasks. The reward of a turn is the sum of `reward_weights[part] * reward_parts[part]`.

    If `dialogue` is True, the prompt of a turn is the whole conversation so far. Otherwise it is the system prompt and
    the observation, which then has to contain all of the history that the policy needs.
    """

    name: str
    system_prompt: str | None
    dialogue: bool
    max_turns: int
    reward_weights: Mapping[str, float]

    def tasks(self, split: Split) -> Iterable[Task]:
        """Return the tasks of `split`. Every call returns the same tasks."""

    def episode(self, task: Task) -> Episode:
        """Return a new episode of `task`."""

    def close(self) -> None:
        """Stop everything that the environment has started, such as simulator processes."""


class DemonstrationEnvironment(Environment, Protocol):
    """An environment that can also solve its tasks."""

    def demonstration(self, task: Task) -> Sequence[str]:
        """Return the answers, one per turn, that solve `task` from its start; empty if no solution is known."""
