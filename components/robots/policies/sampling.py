"""Sampling of action chunks from any family's model: Euler steps from noise, all exact or one at random.

A row's result is bitwise independent of the other rows in the call. On a CPU, rows run one by one without padding,
because the CPU's matrix products sum in an order that depends on a row's position. On a GPU, rows run in groups of a
constant size, where the position does not matter, together with rows of the same padded width. A row's width is its
length rounded up, so it does not depend on other rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import Any, Generic, TypeVar

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
from armature.components.robots.policies.graphs import GraphedFunction
from armature.components.robots.policies.model import ModelBatch, PolicyModel, SamplingPlan


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs ln p of `tokens` (N,) under logits (N, V) of any dtype, shape (N,) float64.

    They are float64 because a policy ratio may be the exponential of their sum over a chunk's tokens.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0].double()


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
class SharedConditions:
    """Inputs of the action expert that are the same for all denoising steps. Each family adds its own.

    used: (N, 1, D) float32, 1 for dimensions with noise and 0 for others.
    """

    used: Tensor


Model = TypeVar("Model", bound=PolicyModel)
Batch = TypeVar("Batch", bound=ModelBatch)
TILE = 64
"""On a GPU, the width of a row is a multiple of this number of tokens.

Matrix products are fast at such widths, and all prompts of LIBERO get the same width.
"""


class FlowSampler(ABC, Generic[Model, Batch]):
    """Samples chunks for encoded observations; puts the model into eval mode.

    Row i of a result depends on example i and seed i alone. All methods raise DataError if an example is longer than
    `width`.
    """

    def __init__(self, model: Model, plan: SamplingPlan, horizon: int, group: int, width: int) -> None:
        """
        Args:
            horizon: Number of actions in a chunk, T.
            group: Number of rows of a forward pass on a GPU; the last group is filled up with copies of a row.
            width: Largest number of tokens of an example.
        """
        self.model, self.plan, self.horizon = model.eval(), plan, horizon
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        self.group, self.width = group if on_gpu else 1, width
        self._padded = on_gpu
        graphed = not any(isinstance(module, FSDPModule) for module in model.modules())
        self._euler_steps = GraphedFunction(self._euler, self.device) if graphed else self._euler
        self._flow_sde_steps = GraphedFunction(self._flow_sde, self.device) if graphed else self._flow_sde
        self._scored_steps = GraphedFunction(self._scored, self.device) if graphed else self._scored

    @torch.no_grad()
    def sample(self, examples: Sequence[Any], seeds: Sequence[int]) -> Tensor:
        """Sample normalized actions by Euler steps: (N, T, max_action_dim) float32 on the CPU, not clamped."""
        noise = row_noise(seeds, self.horizon, self.model.config.max_action_dim)
        (chunks,) = self._in_groups(examples, lambda rows, batch: [self._euler_steps([noise[rows], *batch.observed()])])
        return chunks

    @torch.no_grad()
    def sample_guided(self, examples: Sequence[Any], seeds: Sequence[int], wanted: Tensor, weights: Tensor) -> Tensor:
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
    def sample_flow_sde(self, examples: Sequence[Any], seeds: Sequence[int], noise_level: float) -> ScoredChunks:
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
    def score_flow_losses(self, examples: Sequence[Any], seeds: Sequence[int], flow_samples: int) -> ScoredChunks:
        """Sample the same chunks as `sample`, and compute their flow-matching losses at `flow_samples` times.

        The noise of the losses is drawn from the row's seed after the initial noise.
        """
        shape = (self.horizon, self.model.config.max_action_dim)
        noise = torch.stack([_draw_noises(seed, shape, flow_samples) for seed in seeds])
        actions, logprobs, *values = self._in_groups(
            examples, lambda rows, batch: self._scored_steps([noise[rows], *batch.observed()])
        )
        return ScoredChunks(actions, noise[:, 1:], actions, None, logprobs, values[0] if values else None)

    def _in_groups(self, examples: Sequence[Any], run: Callable[[list[int], Batch], list[Tensor]]) -> list[Tensor]:
        """Divide examples into groups of rows, call `run` for each group, and join the results on the CPU.

        `run` returns a list of tensors (rows, ...). They are joined to tensors (N, ...) in the order of `examples`.
        """
        slots, parts = list[int](), list[list[Tensor]]()
        for rows, batch in self._groups(examples):
            slots += rows
            parts.append([each.cpu() for each in run(rows, batch)])
        order = [slots.index(row) for row in range(len(examples))]
        return [torch.cat(part)[order] for part in zip(*parts, strict=True)]

    def _groups(self, examples: Sequence[Any]) -> Iterator[tuple[list[int], Batch]]:
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
                yield rows, self._batch([examples[row] for row in rows], width)

    def _width(self, example: Any) -> int:
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
        head = self.model.value_head
        with self.model.autocast(self.device):
            conditions = self._conditions(observed)
            actions = self._integrated(noise[:, 0], conditions)
            times = midpoints(noise.shape[1] - 1, self.device)
            draws = FlowSamples(times.expand(len(noise), -1), noise[:, 1:])
            points, _ = noisy_actions(actions, draws, conditions.used[:, 0])
            outputs = [
                self._expert(point, time, conditions)
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

    @abstractmethod
    def _batch(self, examples: Sequence[Any], width: int) -> Batch:
        """Make a batch with one example in each row of `width` tokens, on the CPU."""

    @abstractmethod
    def _conditions(self, observed: Sequence[Tensor]) -> Any:
        """Run the VLM on a batch's `observed` tensors, and return the family's `SharedConditions`."""

    @abstractmethod
    def _expert(self, x: Tensor, time: int | Tensor, conditions: Any) -> tuple[Tensor, Tensor]:
        """Return the velocity, in the dtype of `x`, and the expert's last states (N, T, hidden).

        Args:
            time: Number of the denoising step, or a flow time, (1,).
        """

    def _velocity(self, x: Tensor, step: int, conditions: SharedConditions) -> Tensor:
        return self._expert(x, step, conditions)[0]

    def _used_velocity(self, x: Tensor, step: int, conditions: SharedConditions) -> Tensor:
        """Return the velocity, set to 0 in padded dimensions, so that these dimensions do not affect the guidance."""
        return self._velocity(x, step, conditions) * conditions.used


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
