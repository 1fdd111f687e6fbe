"""What a trained policy answers: actions by Euler steps from noise, or action tokens one by one.

A row's answer has the same bits whatever is asked beside it. On a CPU rows run one by one and nothing is padded: its
matrix products sum in an order that depends on a row's place, so that a row moved within a group changes in its last
bits. On a GPU rows run in groups of a constant size, where every place gives the same, and beside rows of their own
width alone: that of a row is its length, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from armature.components.contracts.errors import DataError
from armature.components.robots.policies.molmoact2.configuration import SEMANTICS, MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.flow import (
    FlowSamples,
    drift,
    guided_velocity,
    loss_logprobs,
    midpoints,
    noise_scales,
    noisy_actions,
)
from armature.components.robots.policies.molmoact2.modeling.graphs import GraphedFunction
from armature.components.robots.policies.molmoact2.modeling.layers import context_index, context_mask
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.modeling.vlm import BackboneOutput, KeyValue
from armature.components.robots.policies.molmoact2.processing.batch import Example, PolicyBatch, collate
from armature.components.robots.policies.settings import RobotPolicySettings

# Action tokens drawn at random, and their probabilities: p = softmax(logits / temperature).


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """(N,) float64: ln p of `tokens` (N,), of logits (N, V) in any dtype.

    In float64, because a ratio of policies may be the exponential of a sum over a chunk's tokens.
    """
    found = torch.log_softmax(logits.float() / temperature, dim=-1)
    return found.gather(-1, tokens[:, None])[:, 0].double()


class TokenDraws:
    """Draws tokens step by step, those of row i by seed i alone, and keeps their log-probs.

    argmax(logits / temperature - ln e) with e ~ Exponential(1) for each token falls on a token with probability p (the
    Gumbel-max trick); e is drawn in float64, whose tails are long enough for rare tokens.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._temperature, self._logprobs = temperature, list[Tensor]()

    def __call__(self, logits: Tensor) -> Tensor:
        """(B,) int64, of logits (B, V)."""
        blank = torch.empty(logits.shape[-1], dtype=torch.float64, device=logits.device)
        drawn = torch.stack([blank.exponential_(generator=each).log() for each in self._generators])
        tokens = (logits.double() / self._temperature - drawn).argmax(-1)
        self._logprobs.append(token_logprobs(logits, tokens, self._temperature))
        return tokens

    @property
    def logprobs(self) -> Tensor:
        """(B, steps) float64 of all tokens that were drawn."""
        return torch.stack(self._logprobs, dim=1)


@dataclass(frozen=True)
class InferencePlan:
    """bidirectional_images, hides_answers, mask_dimensions: as in `LossPlan`. steps: of Euler's method."""

    bidirectional_images: bool
    hides_answers: bool
    mask_dimensions: bool
    steps: int

    @classmethod
    def of(cls, settings: RobotPolicySettings, config: MolmoAct2Config) -> InferencePlan:
        semantics, mode = SEMANTICS[settings.semantics], settings.action_mode
        both_ways = settings.image_attention_at_inference == "bidirectional"
        return cls(
            bidirectional_images=both_ways or mode in semantics.bidirectional_images,
            hides_answers=mode in semantics.hides_answers,
            mask_dimensions=settings.mask_action_dim_padding,
            steps=settings.num_inference_steps or config.flow_matching_num_steps,
        )


def row_noise(seeds: Sequence[int], horizon: int, dimensions: int) -> Tensor:
    """(N, T, dimensions) float32 on the CPU; row i is drawn from seed i alone."""
    return torch.stack(
        [torch.randn(horizon, dimensions, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


@dataclass(frozen=True)
class FlowSDEChunks:
    """Chunks of N rows with one step drawn at random, on the CPU; see `flow_sde`.

    actions, before, after, velocity: (N, T, max_action_dim) float32: the normalized actions, and of the drawn step the
    points before and after it and the velocity. step: (N,) int64, its number. values: (N,) float32, the value head's at
    the point before it; None: the model has no value head.
    """

    actions: Tensor
    before: Tensor
    after: Tensor
    velocity: Tensor
    step: Tensor
    values: Tensor | None


@dataclass(frozen=True)
class ScoredChunks:
    """Euler's chunks of N rows with their flow-matching losses, on the CPU; see `flow.loss_logprobs`.

    actions: (N, T, max_action_dim) float32, normalized. noise: (N, F, T, max_action_dim) float32, of the losses.
    logprobs: (N, T, max_action_dim) float64. values: (N,) float32, the value head's at the first point; None: the model
    has no value head.
    """

    actions: Tensor
    noise: Tensor
    logprobs: Tensor
    values: Tensor | None


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens of one row, drawn one by one, EOS included, with their log-probs (float64).

    value: the value head's, of the prompt; None: the model has no value head.
    """

    tokens: list[int]
    logprobs: list[float]
    value: float | None


@dataclass(frozen=True)
class SharedConditions:
    """What all denoising steps share.

    used: (N, 1, D) float32, 1 where a dimension is the robot's. mask: (N, 1, 1, S) bool. contexts: of every text layer
    the expert's keys and values. modulations: of every block and the final layer at all K steps, (K, parts, 1, hidden).
    """

    used: Tensor
    mask: Tensor
    contexts: Sequence[KeyValue]
    modulations: Sequence[Tensor]


TILE = 64
"""Tokens that the width of rows on a GPU is a multiple of. Matrix products like it, and LIBERO's prompts share one."""


class Sampler:
    """Answers examples without actions. The model is put into eval mode."""

    def __init__(
        self, model: MolmoAct2, plan: InferencePlan, horizon: int, group: int, width: int, pad_id: int
    ) -> None:
        """
        Args:
            horizon: T, actions of a chunk.
            group: Rows of one forward pass on a GPU; a last group that is not full is filled up with copies.
            width: Tokens that no example exceeds.
        """
        self.model, self.plan, self.horizon = model.eval(), plan, horizon
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.group, self.width, self.pad_id = group if on_gpu else 1, width, pad_id
        self._padded = on_gpu
        sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._euler_steps = self._euler if sharded else GraphedFunction(self._euler, self.device)
        self._flow_sde_steps = self._flow_sde if sharded else GraphedFunction(self._flow_sde, self.device)
        self._scored_steps = self._scored if sharded else GraphedFunction(self._scored, self.device)

    @torch.no_grad()
    def sample(self, examples: Sequence[Example], seeds: Sequence[int]) -> Tensor:
        """Normalized actions (N, T, max_action_dim) float32 on the CPU, not clamped.

        Raises:
            DataError: an example is longer than `width`.
        """
        noise = row_noise(seeds, self.horizon, self.model.config.max_action_dim)
        (chunks,) = self._in_groups(examples, lambda rows, batch: [self._euler_steps([noise[rows], *batch.observed()])])
        return chunks

    @torch.no_grad()
    def extend(self, examples: Sequence[Example], seeds: Sequence[int], wanted: Tensor, weights: Tensor) -> Tensor:
        """As `sample`, from the same noise, but pulled to other actions; see `guided_velocity`. Never one CUDA graph.

        Args:
            wanted: (N, T, max_action_dim) float32, normalized. weights: (N, T) float32.

        Raises:
            DataError: an example is longer than `width`.
        """
        noise = row_noise(seeds, self.horizon, self.model.config.max_action_dim)
        (chunks,) = self._in_groups(
            examples, lambda rows, batch: [self._guided([noise[rows], wanted[rows], weights[rows], *batch.observed()])]
        )
        return chunks

    @torch.no_grad()
    def sample_flow_sde(self, examples: Sequence[Example], seeds: Sequence[int], noise_level: float) -> FlowSDEChunks:
        """As `sample`, from the same noise, but with one step of Flow-SDE in each row.

        Which step, and how it falls, is drawn from the row's seed after the noise.

        Args:
            noise_level: See `noise_scales`.

        Raises:
            DataError: an example is longer than `width`.
        """
        steps, shape = self.plan.steps, (self.horizon, self.model.config.max_action_dim)
        noise, drawn, kicks = map(torch.stack, zip(*(_draw(seed, shape, steps) for seed in seeds), strict=True))
        sigmas = torch.zeros(len(drawn), steps)
        sigmas[torch.arange(len(drawn)), drawn] = noise_scales(steps, noise_level)[drawn].float()
        random = (noise, kicks, sigmas)
        actions, before, after, velocity, *values = self._in_groups(
            examples,
            lambda rows, batch: self._flow_sde_steps([*(each[rows] for each in random), *batch.observed()]),
        )
        return FlowSDEChunks(actions, before, after, velocity, drawn, values[0] if values else None)

    @torch.no_grad()
    def score_flow_losses(self, examples: Sequence[Example], seeds: Sequence[int], flow_samples: int) -> ScoredChunks:
        """As `sample`, from the same noise, with the losses of each row's answer at `flow_samples` times.

        Their noise is drawn from the row's seed after the answer's.

        Raises:
            DataError: an example is longer than `width`.
        """
        shape = (self.horizon, self.model.config.max_action_dim)
        noise = torch.stack([_draw_noises(seed, shape, flow_samples) for seed in seeds])
        actions, logprobs, *values = self._in_groups(
            examples, lambda rows, batch: self._scored_steps([noise[rows], *batch.observed()])
        )
        return ScoredChunks(actions, noise[:, 1:], logprobs, values[0] if values else None)

    @torch.no_grad()
    def generate(self, examples: Sequence[Example], max_steps: int) -> list[list[int]]:
        """Of every example the most likely tokens one by one, until EOS (included) or `max_steps` tokens.

        Raises:
            DataError: an example is longer than `width`.
        """
        answers = dict[int, list[int]]()
        for rows, batch in self._groups(examples):
            batch = batch.to(self.device)
            with self.model.autocast(self.device):
                hidden = self.model.encode(batch, self.plan.bidirectional_images)
                said = self._continued(batch, hidden, max_steps, lambda logits: logits.argmax(-1))
            answers |= zip(rows, said, strict=True)
        return [answers[row] for row in range(len(examples))]

    @torch.no_grad()
    def draw(
        self, examples: Sequence[Example], seeds: Sequence[int], max_steps: int, temperature: float
    ) -> list[DrawnTokens]:
        """Of every example tokens drawn one by one by its seed, until EOS (included) or `max_steps` tokens.

        Raises:
            DataError: an example is longer than `width`.
        """
        head, answers = self.model.value_head, dict[int, DrawnTokens]()
        for rows, batch in self._groups(examples):
            batch, draws = batch.to(self.device), TokenDraws([seeds[row] for row in rows], temperature, self.device)
            with self.model.autocast(self.device):
                hidden = self.model.encode(batch, self.plan.bidirectional_images)
                values = [None] * len(rows) if head is None else head(hidden.states[:, -1:]).tolist()
                said = self._continued(batch, hidden, max_steps, draws)
            for row, tokens, logprobs, value in zip(rows, said, draws.logprobs.tolist(), values, strict=True):
                answers[row] = DrawnTokens(tokens, logprobs[: len(tokens)], value)
        return [answers[row] for row in range(len(examples))]

    def _in_groups(
        self, examples: Sequence[Example], answered: Callable[[list[int], PolicyBatch], list[Tensor]]
    ) -> list[Tensor]:
        """What `answered` says of each group, (rows of the group, ...) each, as (N, ...) on the CPU."""
        slots, parts = list[int](), list[list[Tensor]]()
        for rows, batch in self._groups(examples):
            slots += rows
            parts.append([each.cpu() for each in answered(rows, batch)])
        order = [slots.index(row) for row in range(len(examples))]
        return [torch.cat(part)[order] for part in zip(*parts, strict=True)]

    def _groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], PolicyBatch]]:
        """Indices of the rows, and the rows on the CPU, of every group; a group's rows have one width."""
        by_width: dict[int, list[int]] = {}
        for index, example in enumerate(examples):
            if example.length > self.width:
                raise DataError(
                    f"an example has {example.length} tokens, and the policy was set up for {self.width}",
                    code="example_too_long",
                    where=f"observation {index}",
                    remedy="shorten the instruction, or raise max_sequence_length",
                )
            by_width.setdefault(self._width(example), []).append(index)
        for width, members in by_width.items():
            for start in range(0, len(members), self.group):
                rows = [members[min(start + slot, len(members) - 1)] for slot in range(self.group)]
                batch = collate([examples[row] for row in rows], "left", width - 1, self.pad_id)
                self.model.vlm.model.check_images(batch.input_ids, batch.pooling)
                yield rows, batch

    def _width(self, example: Example) -> int:
        """Of its row, which must not depend on its neighbors."""
        return min(self.width, TILE * ceil(example.length / TILE)) if self._padded else example.length

    def _euler(self, inputs: Sequence[Tensor]) -> Tensor:
        """noise (N, T, D), then the batch's `observed`."""
        noise, *observed = (one.to(self.device) for one in inputs)
        with self.model.autocast(self.device):  # around all steps: what it casts, it casts once
            return self._integrated(noise, self._conditions(observed))

    def _integrated(self, noise: Tensor, given: SharedConditions) -> Tensor:
        x = noise * given.used
        for step in range(self.plan.steps):
            x = x + self._velocity(x, step, given) * given.used / self.plan.steps
        return x

    def _scored(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """noise (N, 1 + F, T, D), then `observed`: actions and their log-probs (N, T, D), and with a value head (N,)
        values."""
        noise, *observed = (one.to(self.device) for one in inputs)
        expert, head = self.model.action_expert, self.model.value_head
        with self.model.autocast(self.device):
            given = self._conditions(observed)
            actions = self._integrated(noise[:, 0], given)
            times = midpoints(noise.shape[1] - 1, self.device)
            draws = FlowSamples(times.expand(len(noise), -1), noise[:, 1:])
            points, _ = noisy_actions(actions, draws, given.used[:, 0])
            found = [
                expert.velocity(point, expert.modulations(time), given.contexts, given.mask)
                for point, time in zip(points.unbind(1), times.split(1), strict=True)
            ]
            values = [] if head is None else [head(found[0][1])]
        velocity = torch.stack([each[0] for each in found], dim=1)
        return [actions, loss_logprobs(velocity, actions, draws.noise), *values]

    def _guided(self, inputs: Sequence[Tensor]) -> Tensor:
        """noise and wanted (N, T, D), weights (N, T), then the batch's `observed`."""
        noise, wanted, weights, *observed = (one.to(self.device) for one in inputs)
        steps = self.plan.steps
        with self.model.autocast(self.device):
            given = self._conditions(observed)
            x = noise * given.used
            for step in range(steps):
                own = partial(self._used_velocity, step=step, given=given)
                x = x + guided_velocity(own, x, step / steps, wanted, weights) * given.used / steps
        return x

    def _flow_sde(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """noise and kicks (N, T, D), sigmas (N, steps), 0 but for each row's drawn step, then `observed`.

        (N, T, D) each: actions, and of the drawn step the points before and after it, and the velocity. With a value
        head also (N,), the value at the point before it.
        """
        noise, kicks, sigmas, *observed = (one.to(self.device) for one in inputs)
        steps, head = self.plan.steps, self.model.value_head
        with self.model.autocast(self.device):
            given = self._conditions(observed)
            x = noise * given.used
            kept, values = [torch.zeros_like(x)] * 3, x.new_zeros(len(x))
            for step in range(steps):
                velocity, states = self._expert(x, step, given)
                sigma = sigmas[:, step, None, None]
                change = drift(x, velocity, step / steps, sigma) / steps + sigma / sqrt(steps) * kicks
                moved = x + change * given.used
                kept = [torch.where(sigma > 0, new, old) for new, old in zip((x, moved, velocity), kept, strict=True)]
                if head is not None:
                    values = torch.where(sigmas[:, step] > 0, head(states), values)
                x = moved
        return [x, *kept, *([] if head is None else [values])]

    def _conditions(self, observed: Sequence[Tensor]) -> SharedConditions:
        batch = PolicyBatch.of_observed(observed)
        seen = context_mask(batch, self.plan.hides_answers, self.model.config)
        context = context_index(batch, seen, seen.shape[1] if self._padded else None)
        used = ~batch.dimension_padding if self.plan.mask_dimensions else torch.ones_like(batch.dimension_padding)
        expert, steps = self.model.action_expert, self.plan.steps
        times = torch.arange(steps, device=self.device) / steps
        modulations = [expert.modulations(part) for part in times.split(steps if self._padded else 1)]
        return SharedConditions(
            used=used[:, None].float(),
            mask=context.valid[:, None, None, :],
            contexts=expert.contexts(
                self.model.encode(batch, self.plan.bidirectional_images, cache_only=True).cache, context
            ),
            modulations=[torch.cat(parts) for parts in zip(*modulations, strict=True)],
        )

    def _velocity(self, x: Tensor, step: int, given: SharedConditions) -> Tensor:
        return self._expert(x, step, given)[0]

    def _expert(self, x: Tensor, step: int, given: SharedConditions) -> tuple[Tensor, Tensor]:
        """The velocity, in the dtype of `x`, and the states (N, T, hidden) that it is read from."""
        modulations = [each[step : step + 1] for each in given.modulations]
        velocity, states = self.model.action_expert.velocity(x, modulations, given.contexts, given.mask)
        return velocity.to(x.dtype), states

    def _used_velocity(self, x: Tensor, step: int, given: SharedConditions) -> Tensor:
        """0 where a dimension is not the robot's, which nothing is to be pulled by."""
        return self._velocity(x, step, given) * given.used

    def _continued(
        self, batch: PolicyBatch, hidden: BackboneOutput, max_steps: int, choose: Callable[[Tensor], Tensor]
    ) -> list[list[int]]:
        """Tokens of each row, which `choose` chooses from logits (B, V)."""
        text, eos = self.model.vlm.model.language_model, self.model.config.eos_token_id
        seen = batch.example_ids >= 0
        positions = seen.sum(-1)
        chosen: list[Tensor] = []
        ended = torch.zeros(len(seen), dtype=torch.bool, device=self.device)
        for step in range(max_steps):
            chosen.append(choose(self.model.vlm.lm_head(hidden.states[:, -1])))
            ended = ended | (chosen[-1] == eos)
            if bool(ended.all()) or step + 1 == max_steps:
                break
            seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
            x = text.embed_tokens(chosen[-1][:, None])
            hidden = text(x, (positions + step)[:, None], seen[:, None, None], hidden.cache)
        return [_up_to(row, eos) for row in torch.stack(chosen, dim=1).tolist()]


def _draw(seed: int, shape: tuple[int, int], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a row: the noise, as `row_noise` has it, which step is drawn, and how it falls."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator)
    step = torch.randint(steps, (), generator=generator)
    return noise, step, torch.randn(shape, generator=generator)


def _draw_noises(seed: int, shape: tuple[int, int], count: int) -> Tensor:
    """(1 + count, T, D) of a row: the noise, as `row_noise` has it, and others."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=generator)
    return torch.cat([first[None], torch.randn(count, *shape, generator=generator)])


def _up_to(tokens: list[int], last: int) -> list[int]:
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens
