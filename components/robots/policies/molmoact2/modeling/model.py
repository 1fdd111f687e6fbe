"""MolmoAct2: a vision-language model, and an action expert that attends to the keys and values of its text layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from armature.components.contracts.errors import DataError
from armature.components.models.blockwise import FP8Linear, quantize_layers
from armature.components.models.compiled import COMPILE_OPTIONS
from armature.components.robots.policies.flow import FlowSamples, flow_errors, noisy_actions
from armature.components.robots.policies.graphs import GraphedFunction
from armature.components.robots.policies.model import (
    LossDenominators,
    PolicyLosses,
    PolicyModel,
    Precision,
    call,
    checkpointed,
    compile_calls,
)
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.expert import ActionExpert, BlockInputs, ExpertBlock
from armature.components.robots.policies.molmoact2.modeling.layers import (
    ContextIndex,
    RMSNorm,
    attention_mask,
    context_index,
    context_mask,
)
from armature.components.robots.policies.molmoact2.modeling.losses import (
    DiscreteLoss,
    InferencePlan,
    LabeledTokens,
    LossPlan,
    discrete_loss,
)
from armature.components.robots.policies.molmoact2.modeling.vlm import (
    BackboneOutput,
    KeyValue,
    Molmo2Backbone,
    TextLayer,
    has_gqa_kernel,
)
from armature.components.robots.policies.molmoact2.processing.batch import PolicyBatch
from armature.components.robots.policies.settings import Quantization, Semantics


class MolmoAct2(PolicyModel):
    """The model with its training losses.

    Modules of `vlm` are named as in transformers' Molmo2, and modules of `action_expert` as in released checkpoints.
    There are no buffers before `quantize_text`, so a model built on the meta device is complete once its parameters are
    loaded.

    Example:
        >>> from armature.components.robots.policies.molmoact2.checkpoints.tiny import tiny_config
        >>> from armature.components.robots.policies.settings import TinyPolicySettings
        >>> model = MolmoAct2(tiny_config(TinyPolicySettings(layers=3)))
        >>> len(model.vlm.model.language_model.layers), len(model.action_expert.blocks)
        (3, 3)
    """

    vlm: Molmo2Backbone
    action_expert: ActionExpert
    config: MolmoAct2Config

    def __init__(self, config: MolmoAct2Config, dtype: Precision = "float32", residual_dropout: float = 0.0) -> None:
        """Make a model with random weights.

        Args:
            dtype: "bfloat16": the VLM's weights are bfloat16, except for norms; the action expert's are float32; both
                compute under autocast. "float32": all weights are float32, and autocast of the caller has no effect.
            residual_dropout: Dropout of the text layers, in training.
        """
        super().__init__()
        self.config, self.precision = config, dtype
        self.vlm = Molmo2Backbone(config.molmo2(), residual_dropout)
        self.action_expert = ActionExpert(config)
        self.call = call
        self._frozen: dict[bool, GraphedFunction[list[KeyValue]]] = {}
        if dtype == "bfloat16":
            self.vlm.to(torch.bfloat16)
            for module in self.vlm.modules():
                if isinstance(module, (RMSNorm, nn.LayerNorm)):
                    module.float()

    def checkpoint_gradients(self, active: bool) -> None:
        """Turn activation checkpointing in training on or off, for vision, text and expert layers and image pooling."""
        for module in (self.vlm.model.vision_tower, self.vlm.model.language_model, self.action_expert):
            module.gradient_checkpointing = active

    def freeze_vlm(self, device: torch.device) -> None:
        """Run the VLM without gradients from now on, as a CUDA graph on a GPU; losses and velocities train the rest.

        The VLM must be in eval mode (no dropout) and not sharded.
        """
        self._frozen = {both: GraphedFunction(partial(self._cache, both), device) for both in (False, True)}

    def states_width(self, of_tokens: bool) -> int:
        """Return the width of the action expert's states, or of the VLM's."""
        config = self.config
        return (config.text_config if of_tokens else config.action_expert_config).hidden_size

    def cast_for_inference(self) -> None:
        """Cast the action expert's matrices of a bfloat16 model once, as autocast does at every use.

        Results do not change.
        """
        if self.precision == "bfloat16":
            expert = self.action_expert
            for part in (expert.blocks, expert.context_k_proj, expert.context_v_proj):
                part.to(torch.bfloat16)

    def quantize_text(self, where: str) -> None:
        """Compute the matrix products of the text layers in FP8 from now on, without gradients; see `FP8Linear`.

        Call this method after loading the weights and before `compile_layers`.

        Args:
            where: Name of the setting that asks for quantization, for error messages.

        Raises:
            ConfigurationError: the VLM is not in bfloat16, or the GPU does not support FP8.
        """
        quantize_layers(self.vlm.model.language_model.layers, where)

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of the text layers' matrix products; None if they are computed in the model's dtype."""
        return "fp8" if any(isinstance(module, FP8Linear) for module in self.vlm.modules()) else None

    def compile_layers(self, *, dynamic: bool, split: bool = False) -> None:
        """Compile the layers; see `PolicyModel.compile_layers`.

        Those of a model to be split are compiled one by one, so that FSDP's hooks between layers, which gather weights,
        are not compiled.
        """
        body, expert = self.vlm.model, self.action_expert
        compile_calls(*() if split else (body.vision_tower, body.language_model, expert, self), dynamic=dynamic)
        expert.compile_context(dynamic=dynamic, options=COMPILE_OPTIONS)
        if split:
            for layer in (*body.vision_tower.layers, *body.language_model.layers, *expert.blocks):
                layer.compile(dynamic=dynamic, options=COMPILE_OPTIONS)

    def embeddings(self, semantics: Semantics) -> list[str]:
        """Return the names of the parameters that `freeze_embedding` freezes.

        With the semantics "head", the additional rows of a frozen embedding are still trained.
        """
        table = "vlm.model.language_model.embed_tokens"
        return [f"{table}.embedding"] if semantics == "head" else [f"{table}.embedding", f"{table}.new_embedding"]

    def denominators(self, batch: PolicyBatch, plan: LossPlan) -> LossDenominators:
        """Return the sums of the weights of a batch's examples and of its labeled tokens."""
        weight = float(LabeledTokens.of(batch, plan).weights.sum()) if plan.discrete else 0.0
        return LossDenominators(float(batch.examples if batch.weights is None else batch.weights.sum()), weight)

    def forward(
        self,
        batch: PolicyBatch,
        draws: FlowSamples | None,
        plan: LossPlan,
        denominators: LossDenominators | None = None,
    ) -> PolicyLosses:
        """Compute the losses of a batch.

        Args:
            draws: Noise and times of the flow-matching loss; None if only discrete actions are trained.
            denominators: Denominators of the update that this batch is a part of; None: the batch is the whole update.

        Raises:
            DataError: labels, actions or draws that the plan needs are None.
        """
        self._check(batch, draws, plan)
        zero = torch.zeros((), device=batch.input_ids.device)
        zeros = zero.expand(batch.examples)
        discrete = DiscreteLoss(zero, zero, zeros, zeros)
        with self.autocast(batch.input_ids.device):
            # Both lines wait for sizes from the GPU: they come first, while the GPU has little work queued.
            target = _Flow.of(batch, draws, plan, self.config) if draws is not None and plan.continuous else None
            tokens = LabeledTokens.of(batch, plan) if plan.discrete else None
            if target is None or not self._joins:
                states, errors = self._apart(batch, target, plan)
            else:
                states, errors = self._joined(batch, target, plan)
            if tokens is not None:
                logits = self.vlm.lm_head(tokens.hidden(states))
                weight = float(tokens.weights.sum()) if denominators is None else denominators.token_weight
                discrete = discrete_loss(logits, tokens, plan.z_scale, batch.examples, weight)
        flow = zero
        if errors is not None:
            weighted = errors if batch.weights is None else errors * batch.weights
            flow = weighted.sum() / (denominators or self.denominators(batch, plan)).flow
        return PolicyLosses(
            total=flow + discrete.cross_entropy + discrete.z,
            flow=flow,
            cross_entropy=discrete.cross_entropy,
            z=discrete.z,
            flow_per_example=zeros if errors is None else errors.detach(),
            cross_entropy_per_example=discrete.cross_entropy_per_example,
            z_per_example=discrete.z_per_example,
        )

    def encode(self, batch: PolicyBatch, bidirectional_images: bool, cache_only: bool = False) -> BackboneOutput:
        """Return the VLM's last states and its keys and values.

        With `cache_only`, only the keys and values are computed, and the states are empty.
        """
        mask = attention_mask(batch, bidirectional_images)
        hidden: BackboneOutput = self.vlm.model(
            batch.input_ids, batch.position_ids, mask, batch.pixel_values, batch.pooling, cache_only
        )
        return hidden

    def velocities(
        self,
        batch: PolicyBatch,
        points: Tensor,
        times: Tensor,
        plan: LossPlan | InferencePlan,
        others: Sequence[ActionExpert] = (),
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute velocities with gradients; see `PolicyModel.velocities`."""
        with self.autocast(batch.input_ids.device):
            context = context_index(batch, context_mask(batch, plan.hides_answers, self.config))
            cache = self._hidden(batch, plan.bidirectional_images).cache
            return [
                expert.velocity_and_states(points, times, cache, context, None)
                for expert in (self.action_expert, *others)
            ]

    def answer_logits(self, batch: PolicyBatch, answered: Tensor, plan: InferencePlan) -> tuple[Tensor, Tensor]:
        """Compute logits of tokens with gradients; see `PolicyModel.answer_logits`."""
        predicting = answered.roll(-1, dims=1)
        with self.autocast(batch.input_ids.device):
            states = self.encode(batch, plan.bidirectional_images).states
            last = states[predicting & ~answered][:, None]
            return self.vlm.lm_head(states[predicting]), last

    def _hidden(self, batch: PolicyBatch, bidirectional_images: bool) -> BackboneOutput:
        """Return the VLM's last states and its keys and values.

        A frozen VLM runs as a CUDA graph and only computes keys and values; its states are empty.
        """
        if not self._frozen:
            return self.encode(batch, bidirectional_images)
        self.vlm.model.check_images(batch.input_ids, batch.pooling)
        with torch.no_grad():
            cache = self._frozen[bidirectional_images](batch.observed())
        return BackboneOutput(cache[0][0].new_empty(0), cache)

    def _cache(self, bidirectional_images: bool, observed: Sequence[Tensor]) -> list[KeyValue]:
        batch = PolicyBatch.of_observed(observed)
        with self.autocast(batch.input_ids.device):
            return self.encode(batch, bidirectional_images, cache_only=True).cache

    @property
    def _joins(self) -> bool:
        """True if each text layer is checkpointed together with its expert block, so that no keys and values are kept.

        A sharded model cannot do this: it gathers weights layer by layer for the VLM, but all at once for the expert.
        With dropout, the order of random draws differs from running all text layers first.
        """
        recomputes = self.training and self.action_expert.gradient_checkpointing
        return recomputes and not self._frozen and not isinstance(self, FSDPModule)

    def _apart(self, batch: PolicyBatch, flow: _Flow | None, plan: LossPlan) -> tuple[Tensor, Tensor | None]:
        """Run all text layers, then all expert blocks; return the VLM's last states and the flow errors (E,)."""
        hidden = self._hidden(batch, plan.bidirectional_images)
        if flow is None:
            return hidden.states, None
        cache = hidden.cache
        if plan.knowledge_insulation:
            cache = [(keys.detach(), values.detach()) for keys, values in cache]
        return hidden.states, flow.errors(self.action_expert(flow.points, flow.times, cache, flow.context, flow.valid))

    def _joined(self, batch: PolicyBatch, flow: _Flow, plan: LossPlan) -> tuple[Tensor, Tensor]:
        """Run each text layer together with its expert block; return the VLM's last states and the flow errors (E,)."""
        body, expert = self.vlm.model, self.action_expert
        text = body.language_model
        x = body.embedded(batch.input_ids, batch.pixel_values, batch.pooling)
        y, inputs = expert.begin(flow.points, flow.times, flow.context, flow.valid)
        mask, rope = attention_mask(batch, plan.bidirectional_images), text.rope(batch.position_ids)
        gqa = has_gqa_kernel(x)
        for layer, block in zip(text.layers, expert.blocks, strict=True):
            x, y = checkpointed(
                self.call, True, _pair, layer, expert, block, x, y, rope, mask, gqa, inputs, plan.knowledge_insulation
            )
        return text.norm(x), flow.errors(expert.end(y, inputs).unflatten(0, flow.times.shape))

    def _check(self, batch: PolicyBatch, draws: FlowSamples | None, plan: LossPlan) -> None:
        needed: dict[str, object] = {"labels": batch.labels} if plan.discrete else {}
        if plan.continuous:
            needed |= {"actions": batch.actions, "draws": draws}
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise DataError(
                f"action_mode {plan.action_mode!r} trains on {' and '.join(missing)}, which the batch lacks",
                code="training_targets_missing",
                where="a batch of the policy",
                remedy="encode examples with actions for the same action_mode",
            )


class _Flow(NamedTuple):
    """Inputs and targets of a batch's flow-matching loss.

    times: (E, F) flow times. points: (E, F, T, dimensions), noisy actions at these times.
    target: (E, F, T, dimensions), the velocities to predict.
    context: tokens of the batch that each example's actions attend to.
    valid: (E, T), False for padded steps. used: (E, dimensions), False for dimensions that the robot does not have.
    """

    times: Tensor
    points: Tensor
    target: Tensor
    context: ContextIndex
    valid: Tensor | None
    used: Tensor | None

    @classmethod
    def of(cls, batch: PolicyBatch, draws: FlowSamples, plan: LossPlan, config: MolmoAct2Config) -> _Flow:
        """Compute noisy points, target velocities, context and masks of a batch."""
        assert batch.actions is not None
        used = ~batch.dimension_padding if plan.mask_dimensions else None
        valid = None if batch.horizon_padding is None else ~batch.horizon_padding
        context = context_index(batch, context_mask(batch, plan.hides_answers, config))
        return cls(draws.times, *noisy_actions(batch.actions, draws, used), context, valid, used)

    def errors(self, velocity: Tensor) -> Tensor:
        """Mean squared error of each example's predicted velocity, shape (E,)."""
        return flow_errors(velocity, self.target, self.valid, self.used)


def _pair(
    layer: TextLayer,
    expert: ActionExpert,
    block: ExpertBlock,
    x: Tensor,
    y: Tensor,
    rope: KeyValue,
    mask: Tensor,
    gqa: bool,
    inputs: BlockInputs,
    insulated: bool,
) -> tuple[Tensor, Tensor]:
    """Run a text layer and the expert block that attends to the layer's keys and values.

    Returns the text layer's output (B, L, hidden) and the expert block's output (E x F, T, hidden).
    """
    x, keys, values = layer(x, rope, mask, None, False, gqa)
    cached = (keys.detach(), values.detach()) if insulated else (keys, values)
    return x, expert.read(block, y, cached, inputs)
