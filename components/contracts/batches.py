"""The inputs of a training step: samples, which are rows of a table, and the tensors of one micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Experts, GenerateOutputs, LogProbs, TokenIds

if TYPE_CHECKING:
    import torch


LogRatios = npt.NDArray[np.float32]
"""Array of shape (T,): for each of the T trained tokens, its log-prob under the trainer minus its log-prob under the
sampler."""
TurnAdvantages = Mapping[tuple[str, int], float]
"""Advantage of each turn, keyed by (trajectory id, index of the turn)."""


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """A teacher's log-probs at the T trained tokens of a sample, at the sampler's temperature.

    `logprobs` (T,) float32 belong to the tokens themselves. `ids` (T, k) int32 are the k tokens that the teacher
    finds likeliest in their place, in descending order, and `likeliest` (T, k) float32 are their log-probs; k may be 0.
    """

    logprobs: LogProbs
    ids: npt.NDArray[np.int32]
    likeliest: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Sample:
    """One unpadded training sequence of L tokens: one or several turns of a trajectory.

    All arrays have shape (L,). `loss_mask` is True exactly on sampled tokens. For a sampled token j,
    `behavior_logprobs[j]` is the log-prob with which token j was sampled, `policy_versions[j]` is the version of the
    oldest weights that sampled its turn, and `advantages[j]` is its advantage. For all other tokens these three are
    0.0, -1 and 0.0. Tokens of videos are written as image tokens: to a trainer, a video is an image of several frames.

    `experts` (L, layers, k) int16 are the experts that the server used for each token, -1 where the trainer chooses.
    None: it chooses everywhere. `teacher` is None without a teacher.
    """

    sample_id: str
    group_id: str
    trajectory_id: str
    input_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    behavior_logprobs: LogProbs
    policy_versions: npt.NDArray[np.int32]
    advantages: npt.NDArray[np.float32]
    reward: float
    images: tuple[ImageRef, ...]
    experts: Experts | None = None
    teacher: TeacherScores | None = None


@dataclass
class MultimodalBatch:
    """The tensors of one (micro-)batch.

    `input_ids`, `attention_mask`, `loss_mask` and `behavior_logprobs` have shape (B, L), `rewards` has shape (B,).
    Column j of each (B, L) tensor describes token j, so column 0 is never trained on. The leading dimension of
    `pixel_values` depends on the model family (patches, images, tiles or crops) and is seldom B. `extra_model_kwargs`
    is passed unchanged to the model's forward. `experts` (B, L, layers, k) is as in `Sample`. The constructor validates
    nothing; adapters validate the batches that they build. If `advantages` (B, L) is None, the trainer computes
    advantages from `rewards`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    rewards: torch.Tensor
    pixel_values: torch.Tensor | None = None
    extra_model_kwargs: dict[str, torch.Tensor] = field(default_factory=dict)
    advantages: torch.Tensor | None = None
    experts: torch.Tensor | None = None


# --- The interface between rollouts and a trainer ---


class MultimodalAdapter(ABC):
    """Turns rollouts into the inputs of one model family.

    Subclass this to support another model family. The trainer calls only `build_batch`, and
    `armature.components.models.adapters.validate_batch` checks the batch that it returns. `get_adapter` returns the
    adapter of a supported family.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep the model's tokenizer. If `tokenizer` is a processor, keep the tokenizer that the processor contains."""
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)

    @abstractmethod
    def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
        """Return one batch with a row for each of the B trajectories of `outputs`."""
