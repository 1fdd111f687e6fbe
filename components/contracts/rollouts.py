"""What rollouts produce: trajectories of assistant turns with the exact tokens that the server sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose

import numpy as np
import numpy.typing as npt

from armature.components.contracts.episodes import ActionDefect
from armature.components.contracts.images import ImageRef

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]


def all_equal(rewards: Collection[float]) -> bool:
    """Whether they are one number; sums of float parts may differ by an ulp."""
    return isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


@dataclass(frozen=True, eq=False)
class Turn:
    """One assistant turn.

    `prompt_token_ids` (P,) int32: the whole prompt as the server expanded it, image placeholders included.
    `completion_token_ids` (C,) int32 and `completion_logprobs` (C,) float32: what was sampled, the stop token
    included, with log-probs of the distribution that was sampled from (temperature applied).
    `policy_version`: of the oldest weights that sampled any of it.
    `images`: every image of the prompt in order of appearance, those of earlier turns included.
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
    admissible_key: str | None  # of the observation's admissible actions
    action_defect: ActionDefect | None
    generate_seconds: float
    environment_seconds: float


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode of one task. `reward` is the sum over turns; `truncated`: out of turns or of context, not done."""

    trajectory_id: str
    group_id: str
    environment: str
    task_id: str
    split: str
    turns: tuple[Turn, ...]
    truncated: bool

    @property
    def reward(self) -> float:
        return float(sum(turn.reward for turn in self.turns))

    def earns(self, reward: float) -> bool:
        """Whether the reward is at least `reward`; sums of float parts may fall an ulp short of it."""
        return self.reward >= reward or isclose(self.reward, reward, rel_tol=1e-9)

    @property
    def reward_parts(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for turn in self.turns:
            total.update(turn.reward_parts)
        return dict(total)


@dataclass(frozen=True)
class Failure:
    """A trajectory that could not be finished. `reason` is a short slug that can be counted."""

    trajectory_id: str
    group_id: str
    task_id: str
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class GenerateOutputs:
    """Everything one call for rollouts produced: nothing planned is missing, it is a trajectory or a failure."""

    trajectories: Sequence[Trajectory]
    failures: Sequence[Failure] = field(default_factory=tuple)

    @property
    def drops(self) -> dict[str, int]:
        return dict(Counter(failure.reason for failure in self.failures))
