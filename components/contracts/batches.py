"""What a training step consumes: samples in a table, and the tensors of one micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import GenerateOutputs, LogProbs, TokenIds

if TYPE_CHECKING:
    import torch


LogRatios = npt.NDArray[np.float32]
"""(T,) log-prob under the trainer less that under the sampler, of tokens that were trained on."""
TurnAdvantages = Mapping[tuple[str, int], float]
"""How good each turn was, by trajectory id and the turn's index."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One unpadded training sequence of L tokens: one or several turns of a trajectory.

    All arrays are (L,). `loss_mask` is True exactly on sampled tokens. `behavior_logprobs[j]` is the log-prob
    with which token j was sampled, 0.0 where `loss_mask` is False; `policy_versions[j]` the version of its turn, which
    is that of the turn's oldest token, -1 elsewhere; `advantages[j]` its advantage, 0.0 elsewhere.
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


@dataclass
class MultimodalBatch:
    """The tensors of one (micro-)batch.

    `input_ids`, `attention_mask`, `loss_mask`, `behavior_logprobs`: (B, L); `rewards`: (B,). Column j of each
    (B, L) tensor describes token j, so column 0 is never trained on. `pixel_values` has the leading dimension
    that the model family gives it (patches, images, tiles or crops), seldom B. `extra_model_kwargs` goes to the
    model's forward unchanged. Nothing is validated at construction; adapters validate what they build.
    `advantages` (B, L) is None where the trainer is to compute them from `rewards`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    rewards: torch.Tensor
    pixel_values: torch.Tensor | None = None
    extra_model_kwargs: dict[str, torch.Tensor] = field(default_factory=dict)
    advantages: torch.Tensor | None = None


# The one method between rollouts and a trainer.


class MultimodalAdapter(ABC):
    """Turns rollouts into the inputs of one model family.

    Subclass this to bring your own: `build_batch` is all that the trainer calls, and what it returns is checked
    with `armature.components.models.adapters.validate_batch`. The families that Armature knows come from `get_adapter`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is the model's tokenizer, or its processor, which holds one."""
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)

    @abstractmethod
    def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
        """One batch of B rows from the trajectories of `outputs`."""
