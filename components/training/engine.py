"""The training engine: accumulates gradients, sums them over ranks, clips them and makes optimizer steps.

It knows nothing of the loss. Vision-language models and robot policies subclass it with a `step` of their own.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from armature.components.contracts.errors import ConfigurationError, DivergedError
from armature.components.training.gradient_sums import OverlappedAllReduce, sum_in_fp32
from armature.components.training.optimizer import CompensatedAdamW
from armature.components.training.optimizer_state import OptimizerStates
from armature.components.training.ranks import Ranks, total_norm

Model = TypeVar("Model", bound=nn.Module)
_EPSILON = 1e-6
"""Added to a norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""
ALL = "all"
"""Name of the gradient norm that covers the parameters of all groups together."""
MOST_IN_A_ROW = 10
"""Number of consecutive skipped updates after which training ends with an error."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning-rate schedule and a weight decay."""

    name: str
    parameters: Sequence[nn.Parameter]
    rate: Callable[[float], float]
    """Learning rate as a function of the update's number, 1, 2, ... A fraction lies between two updates."""
    weight_decay: float


@dataclass(frozen=True)
class AppliedUpdate:
    """The result of `TrainingEngine.update`."""

    norms: Mapping[str, float]
    """Gradient norms before clipping, by name: with `clip_groups` one for each group, else one named `ALL`."""
    finite: bool
    """True if all norms are finite and so the optimizer step was made; False if it was skipped."""


class TrainingEngine(Generic[Model]):
    """A model on its ranks, its optimizer, and the number of steps applied.

    A step calls `backward` once per micro-batch and then `update`.

    Args:
        model: a model on `ranks.device`, sharded with FSDP2 if `sharded`. Each parameter that requires a gradient is in
            one of the groups.
        groups: the trained parameters with their learning rates; groups without parameters are dropped.
        max_grad_norm: gradients are clipped to this norm, computed over all groups together or, with `clip_groups`,
            for each group.
        masters: keep and update fp32 masters of bf16 weights; see `CompensatedAdamW`.
        states: where the optimizer keeps its states; see `armature.components.training.optimizer_state`.
        ema_decay: decay of a moving average of the weights; None keeps no average.

    Raises:
        ConfigurationError: no parameter is trained, or a sharded model is to have optimizer states in 8 bits.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> group = ParameterGroup("weights", list(model.parameters()), rate=lambda step: 0.1, weight_decay=0.0)
        >>> engine = TrainingEngine(
        ...     model, [group], Ranks(), sharded=False, betas=(0.9, 0.999), eps=1e-8, max_grad_norm=1.0
        ... )
        >>> engine.backward(model(torch.tensor([3.0, 4.0])).sum(), last=True)
        >>> engine.update(1)
        AppliedUpdate(norms={'all': 5.0}, finite=True)
    """

    def __init__(
        self,
        model: Model,
        groups: Sequence[ParameterGroup],
        ranks: Ranks,
        *,
        sharded: bool,
        betas: tuple[float, float],
        eps: float,
        max_grad_norm: float,
        clip_groups: bool = False,
        masters: bool = False,
        states: OptimizerStates = "device",
        ema_decay: float | None = None,
    ) -> None:
        self.model, self.ranks, self.sharded, self.max_grad_norm = model, ranks, sharded, max_grad_norm
        self.steps_done, self.skipped = 0, SkippedUpdates()
        self.groups = [group for group in groups if group.parameters]
        if not self.groups:
            raise ConfigurationError(
                "no parameter of the model is trained",
                code="nothing_trained",
                where="model.freeze",
                remedy="freeze fewer components",
            )
        if sharded and states == "8bit":
            raise ConfigurationError(
                "optimizer states in 8 bits do not work with a sharded model: a block of moments has one scale, and "
                "sharding would spread the block over several ranks",
                code="optimizer_states_not_split",
                where="trainer.optimizer_states, machine.trainer.sharding",
                remedy='set trainer.optimizer_states = "cpu", or omit it: each rank then keeps its part of the states',
            )
        # FSDP keeps its shards and their gradients in fp32 already.
        self._sums = sum_in_fp32(model) if masters and not sharded else None
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._overlap = None
        # Ranks that share sequences (context parallelism) already run collectives in the backward pass, so for them
        # gradient sums wait until it is over.
        if self._sums is not None and ranks.size > 1 and ranks.context is None:
            self._overlap = OverlappedAllReduce(ranks, self.trained, self._sums)
        self._clipped = {g.name: g.parameters for g in self.groups} if clip_groups else {ALL: self.trained}
        self.optimizer = CompensatedAdamW(
            [{"params": list(g.parameters), "lr": g.rate(1), "weight_decay": g.weight_decay} for g in self.groups],
            betas=betas,
            eps=eps,
            masters=masters,
            states=states,
            ema_decay=ema_decay,
        )

    def backward(self, loss: Tensor, last: bool = False) -> None:
        """Accumulate the gradient of `loss`.

        Args:
            loss: a scalar. Its sum over all micro-batches and ranks is the loss of the update, so it is already divided
                by the number of tokens of all ranks.
            last: True in the last backward pass before an update, so that gradients can be summed over the ranks while
                the pass is still running.

        Raises:
            RuntimeError: a backward pass follows the last one.
        """
        if last and self._overlap is not None:
            self._overlap.start()
        # FSDP averages gradients over its ranks, but `loss` is an addend: undo the division.
        (loss * (self.ranks.size if self.sharded else 1)).backward()

    def discard(self) -> None:
        """Drop the gradients accumulated since the last update."""
        if self._overlap is not None:
            self._overlap.discard()
        if self._sums is not None:
            self._sums.discard()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def update(self, number: int, position: float | None = None, scale: float = 1.0) -> AppliedUpdate:
        """Sum the gradients over the ranks, clip them, and make the optimizer step if they are finite.

        Every rank calls it. Parameters that got no gradient on any rank keep their values and moments.

        Args:
            number: the number of the update, from 1.
            position: the position in the learning-rate schedules, if it differs from `number`.
            scale: factor on all learning rates.

        Raises:
            DivergedError: `MOST_IN_A_ROW` updates in a row were skipped.
        """
        self._sum_gradients()
        norms = {}
        for name, parameters in self._clipped.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            norms[name] = total_norm(gradients)
        finite = all(map(isfinite, norms.values()))
        if finite:
            for group, options in zip(self.groups, self.optimizer.param_groups, strict=True):
                options["lr"] = scale * group.rate(number if position is None else position)
            clips = {name: min(1.0, self.max_grad_norm / (norm + _EPSILON)) for name, norm in norms.items()}
            self.optimizer.step(clips=[clips[group.name if group.name in clips else ALL] for group in self.groups])
        self.discard()
        self.skipped.note(number, norms if len(norms) > 1 else next(iter(norms.values())), finite)
        return AppliedUpdate(norms, finite)

    def last_rates(self) -> dict[str, float]:
        """Return each group's learning rate in the last update, or before any update its rate in the first one."""
        pairs = zip(self.groups, self.optimizer.param_groups, strict=True)
        return {group.name: options["lr"] for group, options in pairs}

    def _sum_gradients(self) -> None:
        """Set `.grad` of each parameter that got a gradient on any rank to the sum over ranks.

        With FSDP nothing is left to do: it sums the gradients of shards in the backward pass.
        """
        # Sums of large gradients began in the last backward pass; `rest` are the parameters still to be summed.
        rest = None if self._overlap is None else self._overlap.finish()
        if self._sums is not None:
            self._sums.give()
        if self.ranks.size == 1 or self.sharded:
            return
        if rest is None:
            reached = [i for i, parameter in enumerate(self.trained) if parameter.grad is not None]
            everywhere: set[Any] = set().union(*self.ranks.gather(reached))
            rest = [self.trained[i] for i in sorted(everywhere)]
        self.ranks.sum_gradients(rest, torch.float32 if self.optimizer.masters else None)


@dataclass
class SkippedUpdates:
    """Counts the updates that were skipped because their gradient was not finite: in total, and in a row.

    Checkpoints store both.
    """

    total: int = 0
    in_a_row: int = 0

    def note(self, step: int, norm: object, applied: bool) -> None:
        """Count one update, applied or skipped.

        Args:
            norm: the gradient norm, or norms by name, for the log.

        Raises:
            DivergedError: this is the `MOST_IN_A_ROW`-th skipped update in a row.
        """
        if applied:
            self.in_a_row = 0
            return
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        log.error("step %d: the gradient is not finite (%s); skipping the optimizer step", step, norm)
        if self.in_a_row >= MOST_IN_A_ROW:
            raise DivergedError(
                f"the gradients of {self.in_a_row} updates in a row are not finite",
                code="gradients_not_finite",
                where=f"step {step}",
                remedy="lower the learning rate and resume from a checkpoint before the first of these updates",
            )


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB.

    On a GPU this is the peak of GPU memory since the last call; on a CPU the process's peak since it started.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak / 2**30)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
