"""Sampling from a trained policy: action chunks by Euler steps from noise, or action tokens one by one.

A row's result is bitwise independent of the other rows in the call. On a CPU, rows run one by one without padding,
because the CPU's matrix products sum in an order that depends on a row's position. On a GPU, rows run in groups of a
constant size, where the position does not matter, together with rows of the same padded width. A row's width is its
length rounded up, so it does not depend on other rows.
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
from armature.components.robots.policies.flow import (
    FlowSamples,
    drift,
    guided_velocity,
    loss_logprobs,
    midpoints,
    noise_scales,
    noisy_actions,
    step_logprobs,
)
from armature.components.robots.policies.molmoact2.configuration import SEMANTICS, MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.graphs import GraphedFunction
from armature.components.robots.policies.molmoact2.modeling.layers import context_index, context_mask
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.modeling.vlm import BackboneOutput, KeyValue
from armature.components.robots.policies.molmoact2.processing.batch import Example, PolicyBatch, collate
from armature.components.robots.policies.settings import RobotPolicySettings

# --- Sampling action tokens from p = softmax(logits / temperature) ---


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs ln p of `tokens` (N,) under logits (N, V) of any dtype, shape (N,) float64.

    They are float64 because a policy ratio may be the exponential of their sum over a chunk's tokens.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0].double()


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
            steps=settings.num_inference_steps or config.flow_matching_num_steps,
        )


def row_noise(seeds: Sequence[int], horizon: int, dimensions: int) -> Tensor:
    """Return the initial noise (N, T, dimensions) float32 on the CPU; row i is drawn from seed i alone."""
    return torch.stack(
        [torch.randn(horizon, dimensions, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


@dataclass(frozen=True)
class ScoredChunks:
    """Chunks of N rows, on the CPU, with log-probs of a random denoising step or losses in place of log-probs.

    actions: (N, T, max_action_dim) float32, normalized.
    before, after: (N, T, max_action_dim) float32, the points before and after the random step. If no step is random,
        the noise of the flow-matching losses, (N, F, T, max_action_dim), and the actions.
    steps: (N,) int64, numbers of the random steps; None if no step is random.
    logprobs: (N, T, max_action_dim) float64; see `step_logprobs` and `loss_logprobs`.
    values: (N,) float32, output of the value head at the point `before`, or, if no step is random, at the noisy point
        of the first loss; None without a value head.
    """

    actions: Tensor
    before: Tensor
    after: Tensor
    steps: Tensor | None
    logprobs: Tensor
    values: Tensor | None


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of one row, EOS included, with their log-probs.

    value: the value head's output for the prompt; None without a value head.
    """

    tokens: list[int]
    logprobs: list[float]
    value: float | None


@dataclass(frozen=True)
class SharedConditions:
    """Inputs of the action expert that are the same for all denoising steps.

    used: (N, 1, D) float32, 1 for the robot's dimensions and 0 for padding.
    mask: (N, 1, 1, S) bool, True for context tokens that the expert attends to.
    contexts: keys and values of the expert for each text layer.
    modulations: shifts, scales and gates of each block and the final layer for all K denoising steps,
        (K, parts, 1, hidden) each.
    """

    used: Tensor
    mask: Tensor
    contexts: Sequence[KeyValue]
    modulations: Sequence[Tensor]


TILE = 64
"""On a GPU, the width of a row is a multiple of this number of tokens.

Matrix products are fast at such widths, and all prompts of LIBERO get the same width.
"""


class Sampler:
    """Samples chunks or action tokens for encoded observations; puts the model into eval mode.

    Row i of a result depends on example i and seed i alone. All methods raise DataError if an example is longer than
    `width`.
    """

    def __init__(
        self, model: MolmoAct2, plan: InferencePlan, horizon: int, group: int, width: int, pad_id: int
    ) -> None:
        """
        Args:
            horizon: Number of actions in a chunk, T.
            group: Number of rows of a forward pass on a GPU; the last group is filled up with copies of a row.
            width: Largest number of tokens of an example.
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
        """Sample normalized actions by Euler steps: (N, T, max_action_dim) float32 on the CPU, not clamped."""
        noise = row_noise(seeds, self.horizon, self.model.config.max_action_dim)
        (chunks,) = self._in_groups(examples, lambda rows, batch: [self._euler_steps([noise[rows], *batch.observed()])])
        return chunks

    @torch.no_grad()
    def sample_guided(
        self, examples: Sequence[Example], seeds: Sequence[int], wanted: Tensor, weights: Tensor
    ) -> Tensor:
        """Sample from the same noise as `sample`, with each step pulled towards `wanted`; see `guided_velocity`.

        Guidance needs gradients, so it never runs as a CUDA graph.

        Args:
            wanted: Normalized actions (N, T, max_action_dim) float32.
            weights: Weights (N, T) float32 of the actions.
        """
        noise = row_noise(seeds, self.horizon, self.model.config.max_action_dim)
        (chunks,) = self._in_groups(
            examples, lambda rows, batch: [self._guided([noise[rows], wanted[rows], weights[rows], *batch.observed()])]
        )
        return chunks

    @torch.no_grad()
    def sample_flow_sde(self, examples: Sequence[Example], seeds: Sequence[int], noise_level: float) -> ScoredChunks:
        """Sample from the same noise as `sample`, but with one random Flow-SDE step in each row.

        The row's seed also chooses the step and draws its noise, both after the initial noise.

        Args:
            noise_level: See `noise_scales`.
        """
        steps, shape = self.plan.steps, (self.horizon, self.model.config.max_action_dim)
        noise, step, step_noise = map(torch.stack, zip(*(_draw(seed, shape, steps) for seed in seeds), strict=True))
        scales = noise_scales(steps, noise_level)
        sigmas = torch.zeros(len(step), steps)
        sigmas[torch.arange(len(step)), step] = scales[step].float()
        random = (noise, step_noise, sigmas)
        actions, before, after, velocity, *values = self._in_groups(
            examples,
            lambda rows, batch: self._flow_sde_steps([*(each[rows] for each in random), *batch.observed()]),
        )
        logprobs = step_logprobs(before, after, velocity, step, scales)
        return ScoredChunks(actions, before, after, step, logprobs, values[0] if values else None)

    @torch.no_grad()
    def score_flow_losses(self, examples: Sequence[Example], seeds: Sequence[int], flow_samples: int) -> ScoredChunks:
        """Sample the same chunks as `sample`, and compute their flow-matching losses at `flow_samples` times.

        The noise of the losses is drawn from the row's seed after the initial noise.
        """
        shape = (self.horizon, self.model.config.max_action_dim)
        noise = torch.stack([_draw_noises(seed, shape, flow_samples) for seed in seeds])
        actions, logprobs, *values = self._in_groups(
            examples, lambda rows, batch: self._scored_steps([noise[rows], *batch.observed()])
        )
        return ScoredChunks(actions, noise[:, 1:], actions, None, logprobs, values[0] if values else None)

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

    def _in_groups(
        self, examples: Sequence[Example], run: Callable[[list[int], PolicyBatch], list[Tensor]]
    ) -> list[Tensor]:
        """Divide examples into groups of rows, call `run` for each group, and join the results on the CPU.

        `run` returns a list of tensors (rows, ...). They are joined to tensors (N, ...) in the order of `examples`.
        """
        slots, parts = list[int](), list[list[Tensor]]()
        for rows, batch in self._groups(examples):
            slots += rows
            parts.append([each.cpu() for each in run(rows, batch)])
        order = [slots.index(row) for row in range(len(examples))]
        return [torch.cat(part)[order] for part in zip(*parts, strict=True)]

    def _groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], PolicyBatch]]:
        """Divide examples into groups of equal row width; yield the indices of a group's examples and their batch.

        The batch is on the CPU.
        """
        by_width: dict[int, list[int]] = {}
        for index, example in enumerate(examples):
            if example.length > self.width:
                raise DataError(
                    f"an example has {example.length} tokens, the policy was set up for at most {self.width}",
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
        """Return the number of tokens of the example's row with padding, which must not depend on other examples."""
        return min(self.width, TILE * ceil(example.length / TILE)) if self._padded else example.length

    def _euler(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return actions (N, T, D), computed by all Euler steps.

        `inputs` are the noise (N, T, D) and the batch's `observed` tensors.
        """
        noise, *observed = (one.to(self.device) for one in inputs)
        with self.model.autocast(self.device):  # one region around all steps casts each weight only once
            return self._integrated(noise, self._conditions(observed))

    def _integrated(self, noise: Tensor, conditions: SharedConditions) -> Tensor:
        x = noise * conditions.used
        for step in range(self.plan.steps):
            x = x + self._velocity(x, step, conditions) * conditions.used / self.plan.steps
        return x

    def _scored(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return actions (N, T, D), their log-probs (N, T, D), and with a value head the values (N,).

        `inputs` are the noise (N, 1 + F, T, D) and the batch's `observed` tensors. The first noise of a row is for
        sampling the actions, the other F are for the losses.
        """
        noise, *observed = (one.to(self.device) for one in inputs)
        expert, head = self.model.action_expert, self.model.value_head
        with self.model.autocast(self.device):
            conditions = self._conditions(observed)
            actions = self._integrated(noise[:, 0], conditions)
            times = midpoints(noise.shape[1] - 1, self.device)
            draws = FlowSamples(times.expand(len(noise), -1), noise[:, 1:])
            points, _ = noisy_actions(actions, draws, conditions.used[:, 0])
            outputs = [
                expert.velocity(point, expert.modulations(time), conditions.contexts, conditions.mask)
                for point, time in zip(points.unbind(1), times.split(1), strict=True)
            ]
            values = [] if head is None else [head(outputs[0][1])]
        velocity = torch.stack([each[0] for each in outputs], dim=1)
        return [actions, loss_logprobs(velocity, actions, draws.noise), *values]

    def _guided(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return actions (N, T, D), computed by Euler steps that are pulled towards wanted actions.

        `inputs` are noise and wanted actions (N, T, D), weights (N, T), and the batch's `observed` tensors.
        """
        noise, wanted, weights, *observed = (one.to(self.device) for one in inputs)
        steps = self.plan.steps
        with self.model.autocast(self.device):
            conditions = self._conditions(observed)
            x = noise * conditions.used
            for step in range(steps):
                velocity = partial(self._used_velocity, step=step, conditions=conditions)
                x = x + guided_velocity(velocity, x, step / steps, wanted, weights) * conditions.used / steps
        return x

    def _flow_sde(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Integrate Euler steps and one random Flow-SDE step in each row.

        Returns the actions, the points before and after the random step, and the velocity at the point before it,
        (N, T, D) each. With a value head, the values (N,) at the point before it follow.

        `inputs` are the initial noise (N, T, D), the noise of the random step (N, T, D), the sigmas (N, steps), and the
        batch's `observed` tensors. The sigmas of a row are 0 except for its random step.
        """
        noise, step_noise, sigmas, *observed = (one.to(self.device) for one in inputs)
        steps, head = self.plan.steps, self.model.value_head
        with self.model.autocast(self.device):
            conditions = self._conditions(observed)
            x = noise * conditions.used
            recorded, values = [torch.zeros_like(x)] * 3, x.new_zeros(len(x))
            for step in range(steps):
                velocity, states = self._expert(x, step, conditions)
                sigma = sigmas[:, step, None, None]
                change = drift(x, velocity, step / steps, sigma) / steps + sigma / sqrt(steps) * step_noise
                moved = x + change * conditions.used
                # torch.where instead of an if: a CUDA graph cannot branch on each row's sigma.
                recorded = [
                    torch.where(sigma > 0, new, old) for new, old in zip((x, moved, velocity), recorded, strict=True)
                ]
                if head is not None:
                    values = torch.where(sigmas[:, step] > 0, head(states), values)
                x = moved
        return [x, *recorded, *([] if head is None else [values])]

    def _conditions(self, observed: Sequence[Tensor]) -> SharedConditions:
        """Run the VLM and return the inputs of the action expert that all denoising steps share."""
        batch = PolicyBatch.of_observed(observed)
        visible = context_mask(batch, self.plan.hides_answers, self.model.config)
        context = context_index(batch, visible, visible.shape[1] if self._padded else None)
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

    def _velocity(self, x: Tensor, step: int, conditions: SharedConditions) -> Tensor:
        return self._expert(x, step, conditions)[0]

    def _expert(self, x: Tensor, step: int, conditions: SharedConditions) -> tuple[Tensor, Tensor]:
        """Return the velocity, in the dtype of `x`, and the expert's last states (N, T, hidden)."""
        modulations = [each[step : step + 1] for each in conditions.modulations]
        velocity, states = self.model.action_expert.velocity(x, modulations, conditions.contexts, conditions.mask)
        return velocity.to(x.dtype), states

    def _used_velocity(self, x: Tensor, step: int, conditions: SharedConditions) -> Tensor:
        """Return the velocity, set to 0 in padded dimensions, so that these dimensions do not affect the guidance."""
        return self._velocity(x, step, conditions) * conditions.used

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


def _draw(seed: int, shape: tuple[int, int], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the random numbers of one Flow-SDE row from its seed.

    Returns the initial noise (the same as in `row_noise`), the number of the random step, and the step's noise.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator)
    step = torch.randint(steps, (), generator=generator)
    return noise, step, torch.randn(shape, generator=generator)


def _draw_noises(seed: int, shape: tuple[int, int], count: int) -> Tensor:
    """Draw 1 + `count` noises of one row from its seed, shape (1 + count, T, D).

    The first is the initial noise, the same as in `row_noise`.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=generator)
    return torch.cat([first[None], torch.randn(count, *shape, generator=generator)])
