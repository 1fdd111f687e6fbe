"""Sampling from a trained MolmoAct2: action chunks as in `FlowSampler`, or action tokens one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armature.components.robots.policies.molmoact2.modeling.layers import context_index, context_mask
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.modeling.vlm import BackboneOutput, KeyValue
from armature.components.robots.policies.molmoact2.processing.batch import Example, PolicyBatch, collate
from armature.components.robots.policies.sampling import FlowSampler, SharedConditions, token_logprobs

# --- Sampling action tokens from p = softmax(logits / temperature) ---


class TokenSampler:
    """Samples one token for each row in every call, and records the tokens' log-probs. Row i uses seed i alone.

    Uses the Gumbel-max trick: with e ~ Exponential(1) for each token, argmax(logits / temperature - ln e) is a token
    with its probability p. e is drawn in float64, whose tails reach far enough for rare tokens.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._temperature, self._logprobs = temperature, list[Tensor]()

    def __call__(self, logits: Tensor) -> Tensor:
        """Sample tokens (B,) int64 from logits (B, V)."""
        blank = torch.empty(logits.shape[-1], dtype=torch.float64, device=logits.device)
        drawn = torch.stack([blank.exponential_(generator=each).log() for each in self._generators])
        tokens = (logits.double() / self._temperature - drawn).argmax(-1)
        self._logprobs.append(token_logprobs(logits, tokens, self._temperature))
        return tokens

    @property
    def logprobs(self) -> Tensor:
        """Log-probs of all sampled tokens, shape (B, calls) float64."""
        return torch.stack(self._logprobs, dim=1)


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of one row, EOS included, with their log-probs.

    value: the value head's output for the prompt; None without a value head.
    """

    tokens: list[int]
    logprobs: list[float]
    value: float | None


@dataclass(frozen=True)
class ExpertInputs(SharedConditions):
    """Inputs of the action expert that are the same for all denoising steps.

    mask: (N, 1, 1, S) bool, True for context tokens that the expert attends to.
    contexts: keys and values of the expert for each text layer.
    modulations: shifts, scales and gates of each block and the final layer for all K denoising steps,
        (K, parts, 1, hidden) each.
    """

    mask: Tensor
    contexts: Sequence[KeyValue]
    modulations: Sequence[Tensor]


class Sampler(FlowSampler[MolmoAct2, PolicyBatch]):
    """Samples chunks or action tokens for encoded observations; see `FlowSampler`."""

    plan: InferencePlan

    def __init__(
        self, model: MolmoAct2, plan: InferencePlan, horizon: int, group: int, width: int, pad_id: int
    ) -> None:
        super().__init__(model, plan, horizon, group, width)
        self.pad_id = pad_id

    @torch.no_grad()
    def generate(self, examples: Sequence[Example], max_steps: int) -> list[list[int]]:
        """Generate the most likely tokens of each example one by one, up to EOS (included) or `max_steps` tokens."""
        generated = dict[int, list[int]]()
        for rows, batch in self._groups(examples):
            batch = batch.to(self.device)
            with self.model.autocast(self.device):
                hidden = self.model.encode(batch, self.plan.bidirectional_images)
                tokens = self._continue(batch, hidden, max_steps, lambda logits: logits.argmax(-1))
            generated |= zip(rows, tokens, strict=True)
        return [generated[row] for row in range(len(examples))]

    @torch.no_grad()
    def sample_tokens(
        self, examples: Sequence[Example], seeds: Sequence[int], max_steps: int, temperature: float
    ) -> list[SampledTokens]:
        """Sample tokens of each example one by one, up to EOS (included) or `max_steps` tokens."""
        head, sampled = self.model.value_head, dict[int, SampledTokens]()
        for rows, batch in self._groups(examples):
            batch, sampler = batch.to(self.device), TokenSampler([seeds[row] for row in rows], temperature, self.device)
            with self.model.autocast(self.device):
                hidden = self.model.encode(batch, self.plan.bidirectional_images)
                values = [None] * len(rows) if head is None else head(hidden.states[:, -1:]).tolist()
                generated = self._continue(batch, hidden, max_steps, sampler)
            for row, tokens, logprobs, value in zip(rows, generated, sampler.logprobs.tolist(), values, strict=True):
                sampled[row] = SampledTokens(tokens, logprobs[: len(tokens)], value)
        return [sampled[row] for row in range(len(examples))]

    def _batch(self, examples: Sequence[Example], width: int) -> PolicyBatch:
        batch = collate(examples, "left", width - 1, self.pad_id)
        self.model.vlm.model.check_images(batch.input_ids, batch.pooling)
        return batch

    def _conditions(self, observed: Sequence[Tensor]) -> ExpertInputs:
        """Run the VLM and return the inputs of the action expert that all denoising steps share."""
        batch = PolicyBatch.of_observed(observed)
        visible = context_mask(batch, self.plan.hides_answers, self.model.config)
        context = context_index(batch, visible, visible.shape[1] if self._padded else None)
        used, _ = self.plan.dimensions(batch)
        used = torch.ones_like(batch.dimension_padding) if used is None else used
        expert, steps = self.model.action_expert, self.plan.steps
        times = torch.arange(steps, device=self.device) / steps
        modulations = [expert.modulations(part) for part in times.split(steps if self._padded else 1)]
        return ExpertInputs(
            used=used[:, None].float(),
            mask=context.valid[:, None, None, :],
            contexts=expert.contexts(
                self.model.encode(batch, self.plan.bidirectional_images, cache_only=True).cache, context
            ),
            modulations=[torch.cat(parts) for parts in zip(*modulations, strict=True)],
        )

    def _expert(self, x: Tensor, time: int | Tensor, conditions: ExpertInputs) -> tuple[Tensor, Tensor]:
        expert = self.model.action_expert
        if isinstance(time, int):
            modulations = [each[time : time + 1] for each in conditions.modulations]
        else:
            modulations = expert.modulations(time)
        velocity, states = expert.velocity(x, modulations, conditions.contexts, conditions.mask)
        return velocity.to(x.dtype), states

    def _continue(
        self, batch: PolicyBatch, hidden: BackboneOutput, max_steps: int, choose: Callable[[Tensor], Tensor]
    ) -> list[list[int]]:
        """Generate tokens that continue the prompt of each row, up to EOS (included) or `max_steps` tokens.

        `hidden` is the VLM's output for the prompts. `choose` maps logits (B, V) to the next tokens (B,).
        """
        text, eos = self.model.vlm.model.language_model, self.model.config.eos_token_id
        visible = batch.example_ids >= 0
        positions = visible.sum(-1)
        chosen: list[Tensor] = []
        ended = torch.zeros(len(visible), dtype=torch.bool, device=self.device)
        for step in range(max_steps):
            chosen.append(choose(self.model.vlm.lm_head(hidden.states[:, -1])))
            ended = ended | (chosen[-1] == eos)
            if bool(ended.all()) or step + 1 == max_steps:
                break
            visible = torch.cat([visible, torch.ones_like(visible[:, :1])], dim=1)
            x = text.embed_tokens(chosen[-1][:, None])
            hidden = text(x, (positions + step)[:, None], visible[:, None, None], hidden.cache)
        rows: list[list[int]] = torch.stack(chosen, dim=1).tolist()
        return [row[: row.index(eos) + 1] if eos in row else row for row in rows]
