"""Training losses: flow matching for continuous actions, cross-entropy and a z-loss for discrete ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from armature.components.robots.policies.model import denoising_steps
from armature.components.robots.policies.molmoact2.configuration import SEMANTICS, MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.batch import IGNORED, PolicyBatch
from armature.components.robots.policies.settings import ActionMode, RobotPolicySettings

TokenWeighting = Literal["root_subsegments_root_tokens", "token"]


@dataclass(frozen=True)
class LossPlan:
    """Losses to compute for a batch, and the attention masks to use.

    bidirectional_images: image tokens of an example attend to each other in both directions.
    hides_answers: see `context_mask`.
    knowledge_insulation: the flow-matching loss has no gradient into the VLM.
    mask_dimensions: dimensions that the robot does not have get no noise and count in no error.
    z_scale: weight of the z-loss, logsumexp squared.
    token_weighting: "root_subsegments_root_tokens" gives each of an example's n labeled tokens the weight 2 / sqrt(n),
        "token" gives it 1.
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
        """Return the plan for a policy's settings."""
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
        """True if the flow-matching loss is computed."""
        return self.action_mode != "discrete"

    @property
    def discrete(self) -> bool:
        """True if the losses of action tokens are computed."""
        return self.action_mode != "continuous"


@dataclass(frozen=True)
class InferencePlan:
    """Attention masks to use at inference, and the number of Euler steps.

    bidirectional_images, hides_answers, mask_dimensions: see `LossPlan`.
    """

    bidirectional_images: bool
    hides_answers: bool
    mask_dimensions: bool
    steps: int

    @classmethod
    def of(cls, settings: RobotPolicySettings, config: MolmoAct2Config) -> InferencePlan:
        """Return the plan for a policy's settings; the checkpoint's configuration fills in the number of steps."""
        semantics, mode = SEMANTICS[settings.semantics], settings.action_mode
        both_ways = settings.image_attention_at_inference == "bidirectional"
        return cls(
            bidirectional_images=both_ways or mode in semantics.bidirectional_images,
            hides_answers=mode in semantics.hides_answers,
            mask_dimensions=settings.mask_action_dim_padding,
            steps=denoising_steps(settings, config),
        )

    def dimensions(self, batch: PolicyBatch) -> tuple[Tensor | None, Tensor | None]:
        """Return the robot's dimensions twice, (E, D), or None twice; see `SamplingPlan`."""
        used = ~batch.dimension_padding if self.mask_dimensions else None
        return used, used


@dataclass(frozen=True)
class LabeledTokens:
    """The K tokens of a batch that have a label. A token is predicted by the state one column before it.

    rows, columns: (K,) int64, positions of the tokens in the batch (B, L).
    labels: (K,) int64, ids of the tokens.
    owners: (K,) int64, number of the example that each token belongs to.
    weights: (K,) float32, weight of each token in the loss.
    """

    rows: Tensor
    columns: Tensor
    labels: Tensor
    owners: Tensor
    weights: Tensor

    @classmethod
    def of(cls, batch: PolicyBatch, plan: LossPlan) -> LabeledTokens:
        """Find the labeled tokens of a batch."""
        assert batch.labels is not None
        rows, columns = (batch.labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        columns = columns + 1
        owners = batch.example_ids[rows, columns]
        weights = torch.ones(len(owners), device=owners.device)
        if plan.token_weighting == "root_subsegments_root_tokens":
            weights = 2.0 / torch.bincount(owners, minlength=batch.examples)[owners].float().sqrt()
        if batch.weights is not None:
            weights = weights * batch.weights[owners]
        return cls(rows, columns, batch.labels[rows, columns], owners, weights)

    def hidden(self, states: Tensor) -> Tensor:
        """Select from states (B, L, hidden) the ones that predict the labels, shape (K, hidden)."""
        return states[self.rows, self.columns - 1]


@dataclass(frozen=True)
class DiscreteLoss:
    """Losses of action tokens: scalars with a gradient, and per-example losses (E,) without a gradient."""

    cross_entropy: Tensor
    z: Tensor
    cross_entropy_per_example: Tensor
    z_per_example: Tensor


def discrete_loss(
    logits: Tensor, tokens: LabeledTokens, z_scale: float, examples: int, token_weight: float
) -> DiscreteLoss:
    """Return the cross-entropy and the z-loss of action tokens.

    The cross-entropy is sum w (logsumexp - logit) / W, the z-loss z_scale sum w logsumexp^2 / W; 0 without tokens.

    Args:
        logits: (K, vocabulary).
        examples: Number of examples of the batch.
        token_weight: W, the sum of the weights w over the whole update.
    """
    logits = logits.float()
    normalizer = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, tokens.labels[:, None])[:, 0]
    weighted = tokens.weights * (normalizer - chosen), tokens.weights * z_scale * normalizer.square()
    total = tokens.weights.sum()
    batch_weight = total + (total == 0)

    def per_example(values: Tensor) -> Tensor:
        sums = torch.zeros(examples, device=values.device).index_add(0, tokens.owners, values.detach())
        return sums * examples / batch_weight

    scalars = (values.sum() / (token_weight or 1.0) for values in weighted)
    return DiscreteLoss(*scalars, *(per_example(values) for values in weighted))
