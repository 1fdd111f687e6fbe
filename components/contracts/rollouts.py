"""Results of rollouts: trajectories of assistant turns, with the exact tokens that the server sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose

import numpy as np
import numpy.typing as npt

from armature.components.contracts.episodes import ActionDefect
from armature.components.contracts.images import ImageRef
from armature.components.contracts.tool_calls import CalledTool

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]
Experts = npt.NDArray[np.integer]
"""The experts of each token in a mixture of experts, (T, layers, k): layers without experts have rows, too."""

MAX_LOGPROB = 1e-5
"""Largest valid log-prob of a sampled token. It is above 0, because a float32 log-softmax may round to a value
slightly above 0."""


def all_equal(rewards: Collection[float]) -> bool:
    """Check that all rewards are equal, up to rounding: sums of the same reward parts may differ by an ulp."""
    return isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


@dataclass(frozen=True, eq=False)
class Turn:
    """One assistant turn.

    `prompt_token_ids` (P,) int32: the whole prompt as the server expanded it, including image placeholders.
    `completion_token_ids` (C,) int32 and `completion_logprobs` (C,) float32: the sampled tokens, including the stop
    token, with their log-probs under the distribution that was sampled from (temperature applied).
    `policy_version`: version of the oldest weights that sampled any of these tokens.
    `images`: all images of the prompt in order of appearance, including images of earlier turns.
    `experts` (P + C - 1, layers, k): the experts that the server used for each token but the last, which it has not
    computed; None if it did not return them.
    """

    index: int
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    completion_logprobs: LogProbs
    finish_reason: str  # "stop", or "length" when max_tokens cut it
    policy_version: int
    images: tuple[ImageRef, ...]
    messages: str  # JSON of the chat messages since the last turn, for people; never re-tokenized
    completion: str
    reward: float
    reward_parts: Mapping[str, float]
    anchor_key: str | None  # the observation's state, for step-level groups
    admissible_key: str | None  # digest of the observation's admissible actions
    action_defect: ActionDefect | None
    generate_seconds: float
    environment_seconds: float
    experts: Experts | None = None
    tool_calls: tuple[CalledTool, ...] = ()  # in the completion; their results are in the next turn's prompt

    def continues(self, earlier: Turn) -> bool:
        """Check that the prompt begins with the tokens and images of an earlier turn, its completion included."""
        tokens = np.concatenate([earlier.prompt_token_ids, earlier.completion_token_ids])
        return np.array_equal(self.prompt_token_ids[: len(tokens)], tokens) and (
            self.images[: len(earlier.images)] == earlier.images
        )


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode of one task. `reward` is the sum over turns. `truncated`: the episode ran out of turns or context."""

    trajectory_id: str
    group_id: str
    environment: str
    task_id: str
    split: str
    turns: tuple[Turn, ...]
    truncated: bool

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns."""
        return float(sum(turn.reward for turn in self.turns))

    def earns(self, reward: float) -> bool:
        """Check that the trajectory's reward is at least `reward`.

        Rounding is tolerated, because a sum of floats may be an ulp too small.
        """
        return self.reward >= reward or isclose(self.reward, reward, rel_tol=1e-9)

    @property
    def samples(self) -> int:
        """Number of token sequences that the turns make. A turn whose prompt begins with the exact tokens and images of
        an earlier turn continues its sequence; a rewritten or branched conversation begins a new one."""
        return sum(not any(turn.continues(before) for before in self.turns[: turn.index][::-1]) for turn in self.turns)

    @property
    def reward_parts(self) -> dict[str, float]:
        """Sum of each reward part over all turns."""
        total: Counter[str] = Counter()
        for turn in self.turns:
            total.update(turn.reward_parts)
        return dict(total)


@dataclass(frozen=True)
class Failure:
    """A trajectory that could not be finished. Failures are counted by `reason`, a short slug."""

    trajectory_id: str
    group_id: str
    task_id: str
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class GenerateOutputs:
    """The result of one call for rollouts. Each planned rollout is in it, as a trajectory or as a failure."""

    trajectories: Sequence[Trajectory]
    failures: Sequence[Failure] = field(default_factory=tuple)

    @property
    def drops(self) -> dict[str, int]:
        """Number of failures by reason."""
        return dict(Counter(failure.reason for failure in self.failures))
