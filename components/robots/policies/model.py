"""The contract of a policy's network: what its batches, its training losses and its sampling have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from armature.components.models.compiled import COMPILE_OPTIONS, copy_function, prepare_compiler
from armature.components.models.context_parallel import to_device
from armature.components.robots.policies.flow import FlowConfig, FlowSamples
from armature.components.robots.policies.settings import RobotPolicySettings, Semantics

Precision = Literal["float32", "bfloat16"]


def call(module: Callable[..., Any], *inputs: Any) -> Any:
    """Return `module(*inputs)`.

    Policies call their layers through this function, so that `compile_calls` can replace it by a compiled copy.
    """
    return module(*inputs)


def checkpointed(module: Callable[..., Any], active: bool, *inputs: Any) -> Any:
    """Return `module(*inputs)`. If `active`, activations are not kept, and the backward pass recomputes them."""
    return checkpoint(module, *inputs, use_reentrant=False) if active else module(*inputs)


def compile_calls(*parts: Any, dynamic: bool) -> None:
    """Let each part of a model call its layers, by its attribute `call`, through a compiled copy of `call`.

    Raises:
        ConfigurationError: there is no C++ compiler.
    """
    prepare_compiler("torch_compile")
    for part in parts:
        part.call = torch.compile(copy_function(call), dynamic=dynamic, options=COMPILE_OPTIONS)


class LossDenominators(NamedTuple):
    """Denominators of an update's losses.

    flow: of the flow-matching loss, in the model's own unit, times their weights: examples in MolmoAct2, numbers of
        actions in SmolVLA.
    token_weight: sum of the labeled tokens' weights; 0 if no tokens are trained.

    If every micro-batch uses the denominators of the whole update, the losses of the micro-batches add up to the
    update's loss.
    """

    flow: float
    token_weight: float = 0.0


class PolicyLosses(NamedTuple):
    """Losses of a batch: total = flow + cross_entropy + z, scalars with a gradient; a part that is not trained is 0.

    The per-example losses (E,) have no gradient.
    The class is a tuple because FSDP finds tensors with gradients only in tuples, lists and dicts.
    """

    total: Tensor
    flow: Tensor
    cross_entropy: Tensor
    z: Tensor
    flow_per_example: Tensor
    cross_entropy_per_example: Tensor
    z_per_example: Tensor


@dataclass(frozen=True)
class ModelExample:
    """An encoded observation, for training with the actions that followed it. Each family has its own arrays.

    input_ids: token ids without padding, (L,) int64.
    """

    input_ids: NDArray[np.int64]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)


@dataclass(frozen=True)
class ModelBatch(ABC):
    """Encoded examples of one forward pass. Each family has its own tensors beside these.

    input_ids: token ids of the rows with padding, (B, L) int64.
    actions: normalized actions (E, T, dimensions); None if the batch is for inference, or only tokens are trained.
    weights: factors of the examples' losses (E,) float32, whose sum replaces their number; None: 1 for each.
    """

    OBSERVED: ClassVar[tuple[str, ...]]
    """Names of the tensors that inference needs."""

    input_ids: Tensor
    actions: Tensor | None
    weights: Tensor | None = field(default=None, kw_only=True)

    @property
    def examples(self) -> int:
        """Number of examples, E: one in each row, unless the family packs several."""
        return len(self.input_ids)

    @property
    @abstractmethod
    def padding(self) -> Tensor:
        """Mask of the rows, (B, L) bool, True for padding."""

    def observed(self) -> list[Tensor]:
        """Return the tensors that inference needs."""
        return [getattr(self, name) for name in self.OBSERVED]

    @classmethod
    def of_observed(cls, tensors: Sequence[Tensor]) -> Self:
        """Make a batch for inference from the tensors that `observed` returned; all other fields are None."""
        values: dict[str, Any] = dict.fromkeys(each.name for each in fields(cls))
        return cls(**values | dict(zip(cls.OBSERVED, tensors, strict=True)))

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on `device`."""
        device = torch.device(device)
        moved: dict[str, Any] = {
            name: to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


class ModelShape(NamedTuple):
    """Sizes of a policy's network, from which its memory is estimated.

    make: returns the network with random weights of a precision.
    text, vision: configurations of transformers. layers: number of text layers and expert layers.
    expert: width of the expert's layers.
    patches, image_tokens: of an image. text_tokens: largest or assumed number of the other tokens of a prompt.
    caches: copies of the VLM's keys and values that the expert's layers keep: as read, joined to others, and projected.
    """

    make: Callable[[Precision], PolicyModel]
    text: Any
    vision: Any
    layers: int
    expert: int
    patches: int
    image_tokens: int
    text_tokens: int
    caches: int = 1


class SamplingPlan(Protocol):
    """Choices of a policy's sampling, which reinforcement learning computes with as well."""

    @property
    def steps(self) -> int:
        """Number of denoising steps."""

    def dimensions(self, batch: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the dimensions that get noise and those that count in a loss, (E, max_action_dim); None: all."""


def denoising_steps(settings: RobotPolicySettings, config: FlowConfig) -> int:
    """Return the number of denoising steps: the settings', or else the checkpoint's."""
    return settings.num_inference_steps or config.flow_matching_num_steps


class ValueHead(nn.Module):
    """Estimates the return that follows an observation: V = MLP(mean over the chunk of rms(states)), in float32.

    The states are the action expert's last states. A policy that predicts action tokens uses the VLM's state of the
    prompt's last token instead.

    The states are detached, so training the value head never changes the policy. A new value head returns 0.

    Args:
        size: Width of the states and of the two hidden layers.
        seed: Seed of the weights.
    """

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, 1)
        )
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.layers[-1].weight)  # type: ignore[arg-type]

    def forward(self, states: Tensor) -> Tensor:
        """Return values (N,) float32 for states (N, T, hidden)."""
        with torch.autocast(states.device.type, enabled=False):
            x = states.detach()
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            y: Tensor = self.layers(functional.rms_norm(x, x.shape[-1:], eps=1e-6).mean(1))
        return y.squeeze(-1)


class PolicyModel(nn.Module, ABC):
    """A policy's network with its training losses: a VLM, and an action expert that is trained by flow matching.

    `value_head` is only used by reinforcement learning and is not part of a released checkpoint.
    """

    untrained: tuple[str, ...] = ()
    """Beginnings of the names of parameters that never get a gradient. They stay frozen and get no adapters."""

    vlm: nn.Module
    action_expert: nn.Module
    config: FlowConfig
    precision: Precision

    def __init__(self) -> None:
        super().__init__()
        self.value_head: ValueHead | None = None

    @abstractmethod
    def embeddings(self, semantics: Semantics) -> list[str]:
        """Return the names of the parameters that `freeze_embedding` freezes."""

    @abstractmethod
    def denominators(self, batch: Any, plan: Any) -> LossDenominators:
        """Return the denominators of the losses of a single batch."""

    @abstractmethod
    def forward(
        self, batch: Any, draws: FlowSamples | None, plan: Any, denominators: LossDenominators | None = None
    ) -> PolicyLosses:
        """Compute the losses of a batch; without `denominators`, the batch is the whole update.

        Args:
            plan: The result of `PolicyFamily.loss_plan`.
        """

    @abstractmethod
    def velocities(
        self, batch: Any, points: Tensor, times: Tensor, plan: Any, others: Sequence[Any] = ()
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute velocities at F points of each example's flow, with gradients.

        Returns the velocity, (E, F, T, dimensions), and the expert's last states, (E, F, T, hidden): first with this
        model's action expert, then with each of `others` in its place.

        Args:
            points: (E, F, T, dimensions).
            times: (E, F) in [0, 1].
            plan: The result of `PolicyFamily.sampling_plan`.
        """

    @abstractmethod
    def states_width(self, of_tokens: bool) -> int:
        """Return the width of the action expert's states, or of the VLM's."""

    def answer_logits(self, batch: Any, answered: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """Compute logits of tokens that continue each example's prompt, with gradients.

        Returns the logits (N, V) that predict the marked tokens, row by row, and the state of each prompt's last token,
        (E, 1, hidden).

        Args:
            answered: (B, L) bool, True for the tokens after the prompt.
        """
        raise NotImplementedError("this family has no action tokens, which its settings refuse")

    def add_value_head(self, seed: int, of_tokens: bool = False) -> ValueHead:
        """Add a new value head; see `ValueHead`.

        Args:
            of_tokens: The value head's input is the VLM's state of the prompt's last token instead of the action
                expert's states.
        """
        head = ValueHead(self.states_width(of_tokens), seed)
        self.value_head = head.to(next(self.action_expert.parameters()).device)
        return self.value_head

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the autocast context that the whole model computes in."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16")

    @abstractmethod
    def checkpoint_gradients(self, active: bool) -> None:
        """Turn activation checkpointing in training on or off."""

    def cast_for_inference(self) -> None:
        """Cast weights once, as autocast does at every use, if that makes predictions faster."""

    def quantize_text(self, where: str) -> None:
        """Compute the matrix products of the text layers in FP8 from now on, without gradients."""
        raise NotImplementedError("this family has no FP8 layers, which its settings refuse")

    @abstractmethod
    def compile_layers(self, *, dynamic: bool, split: bool = False) -> None:
        """Compile vision, text and expert layers at their first call, which fuses elementwise operations.

        Layers of a kind share compiled code. Compiled layers round differently from layers that are not compiled.

        Args:
            dynamic: True compiles once for batches of all shapes. False compiles for each shape, so that the code of a
                shape, and its rounding, does not depend on the shapes before it.
            split: True if the model will be sharded over ranks.

        Raises:
            ConfigurationError: there is no C++ compiler.
        """

    def freeze_vlm(self, device: torch.device) -> None:
        """Prepare for training with a VLM that is frozen from now on."""
