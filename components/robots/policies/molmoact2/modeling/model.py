"""MolmoAct2: a vision-language model, and an action expert that reads the keys and values of its text layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from armature.components.contracts.errors import DataError
from armature.components.models.blockwise import FP8Linear, quantize_layers
from armature.components.models.compiled import VARIANTS, check_compiler, copy_function
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.expert import ActionExpert, ExpertBlock, ReadingBlocks
from armature.components.robots.policies.molmoact2.modeling.flow import FlowSamples, flow_errors, noisy_actions
from armature.components.robots.policies.molmoact2.modeling.graphs import GraphedFunction
from armature.components.robots.policies.molmoact2.modeling.layers import (
    ContextIndex,
    RMSNorm,
    ValueHead,
    attention_mask,
    context_index,
    context_mask,
)
from armature.components.robots.policies.molmoact2.modeling.losses import (
    DiscreteLoss,
    LabeledTokens,
    LossDenominators,
    LossPlan,
    PolicyLosses,
    discrete_loss,
)
from armature.components.robots.policies.molmoact2.modeling.vlm import (
    BackboneOutput,
    KeyValue,
    Molmo2Backbone,
    TextLayer,
    call,
    checkpointed,
    has_gqa_kernel,
)
from armature.components.robots.policies.molmoact2.processing.batch import PolicyBatch
from armature.components.robots.policies.settings import Quantization

Precision = Literal["float32", "bfloat16"]


class MolmoAct2(nn.Module):
    """`vlm` has native Molmo2's names, `action_expert` those of the released checkpoint.

    There is no buffer before `quantize_text`: a model that was built on the meta device is complete when its parameters
    are loaded.

    value_head: of reinforcement learning; no part of a released checkpoint.
    """

    def __init__(self, config: MolmoAct2Config, dtype: Precision = "float32", residual_dropout: float = 0.0) -> None:
        """Random weights.

        Args:
            dtype: "bfloat16": the VLM's weights are bfloat16 but for its norms, the expert's float32, and both
                compute under autocast. "float32": everything is, also inside an autocast of the caller.
            residual_dropout: of the text layers, in training.
        """
        super().__init__()
        self.config, self.precision = config, dtype
        self.vlm = Molmo2Backbone(config.molmo2(), residual_dropout)
        self.action_expert = ActionExpert(config)
        self.value_head: ValueHead | None = None
        self.call = call
        self._frozen: dict[bool, GraphedFunction[list[KeyValue]]] = {}
        if dtype == "bfloat16":
            self.vlm.to(torch.bfloat16)
            for module in self.vlm.modules():
                if isinstance(module, (RMSNorm, nn.LayerNorm)):
                    module.float()

    def checkpoint_gradients(self, active: bool) -> None:
        """In training, compute the activations inside vision, text and expert layers and the pooling of images again
        instead of keeping them."""
        for module in (self.vlm.model.vision_tower, self.vlm.model.language_model, self.action_expert):
            module.gradient_checkpointing = active

    def freeze_vlm(self, device: torch.device) -> None:
        """From now on the losses and the velocity have no gradient to the VLM, which runs as a CUDA graph on a GPU.

        It needs a VLM without dropout in eval mode, and in one piece.
        """
        self._frozen = {both: GraphedFunction(partial(self._cache, both), device) for both in (False, True)}

    def add_value_head(self, seed: int, of_tokens: bool = False) -> ValueHead:
        """A fresh one; see `ValueHead`.

        Args:
            of_tokens: it reads the VLM's state of the prompt's last token, in place of the action expert's states.
        """
        config, device = self.config, next(self.action_expert.parameters()).device
        read = config.text_config if of_tokens else config.action_expert_config
        self.value_head = ValueHead(read.hidden_size, seed).to(device)
        return self.value_head

    def cast_for_inference(self) -> None:
        """Round the expert's matrices to what autocast makes of them at every use; answers keep their bits."""
        if self.precision == "bfloat16":
            expert = self.action_expert
            for part in (expert.blocks, expert.context_k_proj, expert.context_v_proj):
                part.to(torch.bfloat16)

    def quantize_text(self, where: str) -> None:
        """Compute the products of the text layers in FP8 from now on, without gradients; see `FP8Linear`.

        Call it once the weights are there, before `compile_layers`.

        Args:
            where: the setting that asks for it.

        Raises:
            ConfigurationError: the VLM is not in bfloat16, or the GPU cannot.
        """
        quantize_layers(self.vlm.model.language_model.layers, where)

    @property
    def quantization(self) -> Quantization | None:
        """What the text layers compute their products in, where it is not the model's dtype."""
        return "fp8" if any(isinstance(module, FP8Linear) for module in self.vlm.modules()) else None

    def compile_layers(self, *, dynamic: bool, split: bool = False) -> None:
        """Compile vision, text and expert layers at their first call: elementwise work becomes few kernels.

        Layers of a kind share their code. Results differ in rounding from those of layers that are not compiled.

        Args:
            dynamic: True: for batches of all shapes. False: for each shape by itself, so that the code that a shape
                runs, and its rounding, does not depend on the shapes before it.
            split: the model will be split over ranks: what gathers weights between layers is not compiled.

        Raises:
            ConfigurationError: there is no compiler for C++.
        """
        check_compiler("torch_compile")
        torch._dynamo.config.recompile_limit = VARIANTS
        options: dict[str, Any] = {"emulate_precision_casts": True}  # rounds where plain layers do
        body, expert = self.vlm.model, self.action_expert
        expert.compile_context(dynamic=dynamic, options=options)
        if split:
            for layer in (*body.vision_tower.layers, *body.language_model.layers, *expert.blocks):
                layer.compile(dynamic=dynamic, options=options)
        else:
            for part in (body.vision_tower, body.language_model, expert, self):
                part.call = torch.compile(copy_function(call), dynamic=dynamic, options=options)

    def autocast(self, device: torch.device) -> torch.autocast:
        """The precision that all of the model computes in."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16")

    def forward(
        self,
        batch: PolicyBatch,
        draws: FlowSamples | None,
        plan: LossPlan,
        denominators: LossDenominators | None = None,
    ) -> PolicyLosses:
        """The losses of a batch.

        Args:
            draws: Noise and times of the flow-matching loss; None where only discrete actions are trained.
            denominators: Of the update that this batch is a part of; None: the batch is all of it.

        Raises:
            DataError: the batch lacks labels, actions or draws that the plan needs.
        """
        self._check(batch, draws, plan)
        with self.autocast(batch.input_ids.device):
            # First what asks a GPU for sizes, while it has little work to be waited for.
            target = _Flow.of(batch, draws, plan, self.config) if draws is not None and plan.continuous else None
            tokens = LabeledTokens.of(batch, plan) if plan.discrete else None
            if target is None or not self._joins:
                states, errors = self._apart(batch, target, plan)
            else:
                states, errors = self._joined(batch, target, plan)
            discrete = None if tokens is None else self._discrete(batch, states, tokens, plan, denominators)
        nothing = torch.zeros((), device=batch.input_ids.device)
        none_each = nothing.expand(batch.examples)
        examples = batch.examples if denominators is None else denominators.examples
        flow = nothing if errors is None else errors.sum() / examples
        cross_entropy, z = (nothing, nothing) if discrete is None else (discrete.cross_entropy, discrete.z)
        return PolicyLosses(
            total=flow + cross_entropy + z,
            flow=flow,
            cross_entropy=cross_entropy,
            z=z,
            flow_per_example=none_each if errors is None else errors.detach(),
            cross_entropy_per_example=none_each if discrete is None else discrete.cross_entropy_per_example,
            z_per_example=none_each if discrete is None else discrete.z_per_example,
        )

    def encode(self, batch: PolicyBatch, bidirectional_images: bool, cache_only: bool = False) -> BackboneOutput:
        """The VLM's last states, which are empty with `cache_only`, and every text layer's keys and values."""
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
        bidirectional_images: bool,
        hides_answers: bool,
        others: Sequence[ActionExpert] = (),
    ) -> list[tuple[Tensor, Tensor]]:
        """The velocity at F points of each example's flow, (E, F, T, dimensions), with its gradient, and the expert's
        states that it is read from, (E, F, T, hidden): of this model, then of those with `others` for its expert.

        Args:
            points: (E, F, T, dimensions). times: (E, F) in [0, 1].
            bidirectional_images, hides_answers: as in `LossPlan`.
        """
        with self.autocast(batch.input_ids.device):
            context = context_index(batch, context_mask(batch, hides_answers, self.config))
            cache = self._hidden(batch, bidirectional_images).cache
            return [
                expert.velocity_and_states(points, times, cache, context, None)
                for expert in (self.action_expert, *others)
            ]

    def answer_logits(self, batch: PolicyBatch, answered: Tensor, bidirectional_images: bool) -> tuple[Tensor, Tensor]:
        """Of tokens that continue each example's prompt: the logits (N, V) that they are drawn by, with their gradient,
        row by row, and the state (E, 1, hidden) of each prompt's last token.

        Args:
            answered: (B, L) bool, True on these tokens.
        """
        predicting = answered.roll(-1, dims=1)
        with self.autocast(batch.input_ids.device):
            states = self.encode(batch, bidirectional_images).states
            last = states[predicting & ~answered][:, None]
            return self.vlm.lm_head(states[predicting]), last

    def _hidden(self, batch: PolicyBatch, bidirectional_images: bool) -> BackboneOutput:
        """`encode`, or what it caches where the VLM is frozen; its states are empty then."""
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
        """Whether a text layer and the block that reads it are recomputed together, and its keys and values not kept.

        A model that is split gathers the weights of layers as it runs them, and those of the expert at once. Where both
        have dropout, their random draws then come in another order than where all text layers are first.
        """
        recomputes = self.training and self.action_expert.gradient_checkpointing
        return recomputes and not self._frozen and not isinstance(self, FSDPModule)

    def _apart(self, batch: PolicyBatch, flow: _Flow | None, plan: LossPlan) -> tuple[Tensor, Tensor | None]:
        """The VLM's last states, and the errors of the flow, (E,): all text layers, then all blocks."""
        hidden = self._hidden(batch, plan.bidirectional_images)
        if flow is None:
            return hidden.states, None
        cache = hidden.cache
        if plan.knowledge_insulation:
            cache = [(keys.detach(), values.detach()) for keys, values in cache]
        return hidden.states, flow.errors(self.action_expert(flow.points, flow.times, cache, flow.context, flow.valid))

    def _joined(self, batch: PolicyBatch, flow: _Flow, plan: LossPlan) -> tuple[Tensor, Tensor]:
        """As `_apart`, layer by layer with its block."""
        body, expert = self.vlm.model, self.action_expert
        text = body.language_model
        x = body.embedded(batch.input_ids, batch.pixel_values, batch.pooling)
        y, given = expert.begin(flow.points, flow.times, flow.context, flow.valid)
        mask, rope = attention_mask(batch, plan.bidirectional_images), text.rope(batch.position_ids)
        gqa = has_gqa_kernel(x)
        for layer, block in zip(text.layers, expert.blocks, strict=True):
            x, y = checkpointed(
                self.call, True, _pair, layer, expert, block, x, y, rope, mask, gqa, given, plan.knowledge_insulation
            )
        return text.norm(x), flow.errors(expert.end(y, given).unflatten(0, flow.times.shape))

    def _discrete(
        self,
        batch: PolicyBatch,
        states: Tensor,
        tokens: LabeledTokens,
        plan: LossPlan,
        denominators: LossDenominators | None,
    ) -> DiscreteLoss:
        logits = self.vlm.lm_head(tokens.hidden(states))
        weight = float(tokens.weights.sum()) if denominators is None else denominators.token_weight
        return discrete_loss(logits, tokens, plan.z_scale, batch.examples, weight)

    def _check(self, batch: PolicyBatch, draws: FlowSamples | None, plan: LossPlan) -> None:
        missing = [
            name
            for name, value, needed in (
                ("labels", batch.labels, plan.discrete),
                ("actions", batch.actions, plan.continuous),
                ("draws", draws, plan.continuous),
            )
            if needed and value is None
        ]
        if missing:
            raise DataError(
                f"action_mode {plan.action_mode!r} trains on {' and '.join(missing)}, and the batch has none",
                code="training_targets_missing",
                where="a batch of the policy",
                remedy="encode examples with actions for the same action_mode",
            )


class _Flow(NamedTuple):
    """What a flow-matching loss needs besides velocities: see `noisy_actions`, `ActionExpert` and `flow_errors`."""

    times: Tensor
    points: Tensor
    target: Tensor
    context: ContextIndex
    valid: Tensor | None
    used: Tensor | None

    @classmethod
    def of(cls, batch: PolicyBatch, draws: FlowSamples, plan: LossPlan, config: MolmoAct2Config) -> _Flow:
        assert batch.actions is not None
        used = ~batch.dimension_padding if plan.mask_dimensions else None
        valid = None if batch.horizon_padding is None else ~batch.horizon_padding
        context = context_index(batch, context_mask(batch, plan.hides_answers, config))
        return cls(draws.times, *noisy_actions(batch.actions, draws, used), context, valid, used)

    def errors(self, velocity: Tensor) -> Tensor:
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
    given: ReadingBlocks,
    insulated: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs of a text layer and of the block that reads its keys and values."""
    x, keys, values = layer(x, rope, mask, None, False, gqa)
    read = (keys.detach(), values.detach()) if insulated else (keys, values)
    return x, expert.read(block, y, read, given)
