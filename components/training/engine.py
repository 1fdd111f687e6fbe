"""What trains, whatever the loss: a model on its ranks, its optimizer, and how gradients become an update."""

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
"""What torch's clipping adds to a norm before it divides by it."""
ALL = "all"
"""The name of the gradients of all groups together."""
MOST_IN_A_ROW = 10
"""Updates that may be skipped one after another before training ends."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate of their own; `rate` is called with the number of the update, from 1, or with a
    position between two."""

    name: str
    parameters: Sequence[nn.Parameter]
    rate: Callable[[float], float]
    weight_decay: float


@dataclass(frozen=True)
class AppliedUpdate:
    """The norms of the gradients that were clipped, by name, and whether the optimizer step was made."""

    norms: Mapping[str, float]
    finite: bool


class TrainingEngine(Generic[Model]):
    """A model, its optimizer and its position.

    Args:
        model: on `ranks.device`, sharded if `sharded`; what requires a gradient is in one of the groups.
        groups: of parameters; empty ones are left out.
        max_grad_norm: largest norm of the gradients of all groups together, or of each with `clip_groups`.
        masters: of weights in bf16 the fp32 ones are kept and updated; see `CompensatedAdamW`.
        states: where the optimizer's states are; see `armature.components.training.optimizer_state`.
        ema_decay: of a moving average of the weights; None: no average.

    Raises:
        ConfigurationError: nothing is trained, or states in 8 bits of a model that is split.
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
                "nothing of the model is trained", code="nothing_trained", where="model.freeze", remedy="freeze less"
            )
        if sharded and states == "8bit":
            raise ConfigurationError(
                "a block of moments in 8 bits has one scale, and a model that is split has it on several ranks",
                code="optimizer_states_not_split",
                where="trainer.optimizer_states, machine.trainer_sharding",
                remedy='set trainer.optimizer_states = "cpu", or leave it out: each rank has its part of the states',
            )
        # FSDP keeps its shards, and their gradients, in fp32.
        self._sums = sum_in_fp32(model) if masters and not sharded else None
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._overlap = None
        # Ranks that share sequences run collectives of their own in the backward pass.
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
        """Accumulate the gradient of `loss`, this rank's addend of a loss that is normalized over all ranks.

        Args:
            last: whether this is the last backward pass before the update, so that sums over ranks can begin.

        Raises:
            RuntimeError: another one follows the last.
        """
        if last and self._overlap is not None:
            self._overlap.start()
        # FSDP averages gradients over its ranks.
        (loss * (self.ranks.size if self.sharded else 1)).backward()

    def discard(self) -> None:
        """Forget the gradients since the last update."""
        if self._overlap is not None:
            self._overlap.discard()
        if self._sums is not None:
            self._sums.discard()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def update(self, number: int, position: float | None = None, scale: float = 1.0) -> AppliedUpdate:
        """Sum the gradients over the ranks, clip them, and make the optimizer step if they are finite.

        Every rank calls it. A parameter that no rank's loss reached stays untouched, its moments too.

        Args:
            position: where in their schedules the learning rates are; None: at `number`.
            scale: learning rates are multiplied by it.

        Raises:
            DivergedError: too many updates in a row were skipped.
        """
        self._sum_gradients()
        norms = {}
        for name, parameters in self._clipped.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            norms[name] = total_norm(gradients)
        finite = all(map(isfinite, norms.values()))
        if finite:
            for group, own in zip(self.groups, self.optimizer.param_groups, strict=True):
                own["lr"] = scale * group.rate(number if position is None else position)
            clips = {name: min(1.0, self.max_grad_norm / (norm + _EPSILON)) for name, norm in norms.items()}
            self.optimizer.step(clips=[clips[group.name if group.name in clips else ALL] for group in self.groups])
        self.discard()
        self.skipped.note(number, norms if len(norms) > 1 else next(iter(norms.values())), finite)
        return AppliedUpdate(norms, finite)

    def last_rates(self) -> dict[str, float]:
        """The learning rate of each group in the last update that was made; before it, that of the first."""
        return {group.name: own["lr"] for group, own in zip(self.groups, self.optimizer.param_groups, strict=True)}

    def _sum_gradients(self) -> None:
        """Give each parameter that was reached on any rank its gradient; FSDP has summed those of shards."""
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
    """Count the updates that were skipped because their gradient is not finite.

    In all, and since the last update that was made. Checkpoints keep both.
    """

    total: int = 0
    in_a_row: int = 0

    def note(self, step: int, norm: object, applied: bool) -> None:
        """One update, applied or skipped.

        Raises:
            DivergedError: `MOST_IN_A_ROW` were skipped one after another.
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
                remedy="lower the learning rate, and start again from a checkpoint before the first of them",
            )


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used since the last call: of the GPU; on CPU of the process since it began."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak / 2**30)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
