"""What is minimized: flow matching for continuous actions, cross-entropy and its z part for discrete ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from armature.components.robots.policies.molmoact2.configuration import SEMANTICS
from armature.components.robots.policies.molmoact2.processing.batch import PolicyBatch
from armature.components.robots.policies.settings import ActionMode, RobotPolicySettings

IGNORE = -100  # a label where nothing is learned
TokenWeighting = Literal["root_subsegments_root_tokens", "token"]


@dataclass(frozen=True)
class LossPlan:
    """Which losses are taken of a batch, and what the model sees while they are.

    bidirectional_images: image tokens of an example attend to each other. hides_answers: see `context_mask`.
    knowledge_insulation: no gradient from the flow-matching loss into the VLM.
    mask_dimensions: dimensions that a robot does not have are neither noise nor error.
    z_scale: weight of logsumexp squared.
    token_weighting: "root_subsegments_root_tokens" gives each of an example's n tokens the weight 2 / sqrt(n), "token"
        gives it 1.
    """

    action_mode: ActionMode
    bidirectional_images: bool
    hides_answers: bool
    knowledge_insulation: bool
    mask_dimensions: bool
    z_scale: float
    token_weighting: TokenWeighting

    @classmethod
    def of(cls, settings: RobotPolicySettings) -> LossPlan:
        semantics, mode = SEMANTICS[settings.semantics], settings.action_mode
        return cls(
            action_mode=mode,
            bidirectional_images=mode in semantics.bidirectional_images,
            hides_answers=mode in semantics.hides_answers,
            knowledge_insulation=settings.enable_knowledge_insulation,
            mask_dimensions=settings.mask_action_dim_padding,
            z_scale=settings.softmax_auxiliary_loss_scale,
            token_weighting=settings.discrete_loss_token_weighting,
        )

    @property
    def continuous(self) -> bool:
        return self.action_mode != "discrete"

    @property
    def discrete(self) -> bool:
        return self.action_mode != "continuous"


@dataclass(frozen=True)
class LossDenominators:
    """What sums over an update are divided by: its examples, and the weights of its labeled tokens.

    Losses of the update's parts, each with the whole update's denominators, add up to the loss of the whole.
    """

    examples: float
    token_weight: float

    @classmethod
    def of(cls, batch: PolicyBatch, plan: LossPlan) -> LossDenominators:
        weight = float(LabeledTokens.of(batch, plan).weights.sum()) if plan.discrete else 0.0
        return cls(float(batch.examples), weight)

    def __add__(self, other: LossDenominators) -> LossDenominators:
        return LossDenominators(self.examples + other.examples, self.token_weight + other.token_weight)


class PolicyLosses(NamedTuple):
    """total = flow + cross_entropy + z, scalars with a graph, 0 where a part is not trained.

    A tuple, in which FSDP finds the tensors whose gradients it waits for.
    The per-example values (E,) have none. Their means are the scalars of a batch with its own denominators.
    """

    total: Tensor
    flow: Tensor
    cross_entropy: Tensor
    z: Tensor
    flow_per_example: Tensor
    cross_entropy_per_example: Tensor
    z_per_example: Tensor


@dataclass(frozen=True)
class LabeledTokens:
    """The K tokens of a batch that are learned, in rows and columns of (B, L); each is predicted one column before.

    owners: (K,) example of each, weights: (K,) float32.
    """

    rows: Tensor
    columns: Tensor
    labels: Tensor
    owners: Tensor
    weights: Tensor

    @classmethod
    def of(cls, batch: PolicyBatch, plan: LossPlan) -> LabeledTokens:
        assert batch.labels is not None
        rows, columns = (batch.labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
        columns = columns + 1
        owners = batch.example_ids[rows, columns]
        weights = torch.ones(len(owners), device=owners.device)
        if plan.token_weighting == "root_subsegments_root_tokens":
            weights = 2.0 / torch.bincount(owners, minlength=batch.examples)[owners].float().sqrt()
        return cls(rows, columns, batch.labels[rows, columns], owners, weights)

    def hidden(self, states: Tensor) -> Tensor:
        """Of (B, L, hidden), the K states that predict the labels."""
        return states[self.rows, self.columns - 1]


@dataclass(frozen=True)
class DiscreteLoss:
    cross_entropy: Tensor
    z: Tensor
    cross_entropy_per_example: Tensor
    z_per_example: Tensor


def discrete_loss(
    logits: Tensor, tokens: LabeledTokens, z_scale: float, examples: int, token_weight: float
) -> DiscreteLoss:
    """sum w (logsumexp - logit) / max(W, 1), and z_scale sum w logsumexp^2 / max(W, 1).

    Args:
        logits: (K, vocabulary). token_weight: W, the sum of the weights w of the whole update.
    """
    logits = logits.float()
    normalizer = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, tokens.labels[:, None])[:, 0]
    weighted = tokens.weights * (normalizer - chosen), tokens.weights * z_scale * normalizer.square()
    own = tokens.weights.sum().clamp(min=1.0)

    def of_examples(values: Tensor) -> Tensor:
        sums = torch.zeros(examples, device=values.device).index_add(0, tokens.owners, values.detach())
        return sums * examples / own

    scalars = (values.sum() / max(token_weight, 1.0) for values in weighted)
    return DiscreteLoss(*scalars, *(of_examples(values) for values in weighted))
