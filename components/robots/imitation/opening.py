"""The model of a training of a policy: read whole or split over ranks, its trained parts and their parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.load import MappedWeights
from armature.components.models.lora import lora_config, merged_weights
from armature.components.models.settings import AdapterSettings
from armature.components.robots.imitation.settings import PolicyUpdateSettings, VLATrainerSettings
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import (
    empty_model,
    load_model,
    read_model,
    save_policy,
)
from armature.components.robots.policies.molmoact2.checkpoints.parts import PolicyParts
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.settings import Semantics
from armature.components.training.engine import ParameterGroup
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks, whole
from armature.components.training.schedule import warmup_cosine
from armature.components.training.sharding import Unit, sharder

# The units of a policy that is split over ranks.


def units(model: MolmoAct2, precision: str) -> Iterator[Unit]:
    """With `precision` bfloat16 the VLM is gathered and computes in bf16, the action expert in fp32 as in one process.

    The expert is one: the projections of the contexts are used between its blocks. Every weight is in a module that
    sampling calls, or in the expert, so that a policy can be asked without the root's forward pass.
    """
    lower = torch.bfloat16 if precision == "bfloat16" else None
    body = model.vlm.model
    vlm = [
        *body.vision_tower.layers,
        body.vision_tower,
        body.multi_modal_projector,
        *body.language_model.layers,
        body.language_model.embed_tokens,
        body.language_model,
        model.vlm.lm_head,
    ]
    yield from ((module, lower) for module in vlm)
    yield model.action_expert, None
    register_fsdp_forward_method(model.action_expert, "velocity_and_states")
    if model.value_head is not None:
        yield model.value_head, None
    yield model, lower


@contextmanager
def whole_expert(model: MolmoAct2) -> Iterator[None]:
    """Within it a sharded expert is gathered: sampling uses parts of it, which gather nothing by themselves."""
    expert = model.action_expert
    if not isinstance(expert, FSDPModule):
        yield
        return
    expert.unshard()
    try:
        yield
    finally:
        expert.reshard()


@dataclass(frozen=True)
class OpenedModel:
    """A model that is prepared for its training.

    model: on the CPU; on the meta device where it is to be split. named: with shapes, dtypes and what requires a
    gradient, and `weights` by name, on the first rank of a split one; `model` and None on every other. shard: splits
    `model`, and gives each rank its shards; None: every rank has all of it.
    """

    model: MolmoAct2
    named: MolmoAct2
    weights: Mapping[str, Tensor] | None
    shard: Callable[[MolmoAct2], None] | None
    dtypes: Mapping[str, torch.dtype]

    def publish(self, folder: Path, parts: PolicyParts, ranks: Ranks) -> None:
        """Write the policy, adapters merged, in the dtypes that it was loaded in. Every rank calls it."""
        merged = merged_weights(self.model)
        weights = {name: whole(value).to(self.dtypes.get(name, value.dtype)) for name, value in merged}
        if ranks.first:
            save_policy(folder, parts, weights)


def open_model(
    source: Path,
    parts: PolicyParts,
    prepare: Callable[[MolmoAct2], object],
    processes: TrainerProcesses,
    ranks: Ranks,
) -> OpenedModel:
    """
    Args:
        prepare: freezes a model, and adds to it what is trained besides; called before it is split.

    Raises:
        ConfigurationError: ranks are to share sequences.
        DataError: a weight is missing, unknown or of another shape.
    """
    if ranks.context is not None:
        raise ConfigurationError(
            "ranks share sequences of vision-language models alone, and this is a robot policy",
            code="context_parallel_unsupported",
            where="machine.trainer_context_parallel",
            remedy="leave it out",
        )
    sharded = processes.sharding is not None
    model = empty_model(parts) if sharded else load_model(source, parts)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    prepare(model)
    if not sharded:
        return OpenedModel(model, model, None, None, dtypes)
    named, weights = model, None
    if ranks.first:
        named, stored = read_model(source, parts)
        prepare(named)
        weights = MappedWeights(named, stored)
    cut = partial(units, precision=parts.settings.dtype)
    methods = ("velocities", "answer_logits")
    shard = sharder(ranks, processes.copies, cut, weights, cast_inputs=False, methods=methods)
    return OpenedModel(model, named, weights, shard, dtypes)


# Low-rank adapters in a policy, whose other modules stay as they are.


def add_adapters(
    model: nn.Module, chosen: Callable[[str], bool], settings: AdapterSettings, seed: int, dropout: float = 0.0
) -> list[str]:
    """Put an adapter into every linear layer whose full name is `chosen`; their names. All else is frozen.

    A, (rank, in), begins as N(0, 1 / rank) in standard deviations, B, (out, rank), as zeros; both are in fp32.

    Raises:
        ConfigurationError: there is no such layer.
    """
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and chosen(name)]
    if not names:
        raise ConfigurationError(
            "no linear layer is left for an adapter", code="no_layer_for_adapters", where="training.mode"
        )
    inject_adapter_in_model(lora_config(names, settings.rank, settings.alpha, dropout), model)
    random = torch.Generator().manual_seed(seed)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, LoraLayer)
        if isinstance(model, MolmoAct2) and model.precision == "bfloat16":
            layer.cast_input_dtype_enabled = False  # autocast computes in bf16: a copy in fp32 would be cast back
        down, up = layer.lora_A["default"].float(), layer.lora_B["default"].float()
        with torch.no_grad():
            down.weight.copy_(torch.randn(down.weight.shape, generator=random) / settings.rank)
            up.weight.zero_()
    return names


EXPERT = "action_expert."
VALUE_HEAD = "value_head."
VISION = "vlm.model.vision_tower."
CONNECTOR = "vlm.model.multi_modal_projector."
EMBEDDING = "vlm.model.language_model.embed_tokens"
GROUPS = ("vlm", "vit", "connector", "action_expert")


def prepare(model: nn.Module, settings: PolicyUpdateSettings, semantics: Semantics) -> None:
    """Freeze and adapt `model` for `settings.mode`; what requires a gradient then is trained.

    Args:
        semantics: in head a frozen embedding still learns its new rows; before it did not.
    """
    model.requires_grad_(settings.mode == "full")
    if settings.mode == "full" and settings.freeze_embedding:
        frozen = [".embedding"] if semantics == "head" else [".embedding", ".new_embedding"]
        for name in frozen:
            model.get_parameter(EMBEDDING + name).requires_grad_(False)
    if settings.lora is not None:
        expert_too = settings.mode == "lora_expert"
        dropout = settings.lora_dropout if isinstance(settings, VLATrainerSettings) else 0.0
        add_adapters(model, lambda n: expert_too or not n.startswith(EXPERT), settings.lora, settings.seed, dropout)
    if settings.mode in ("lora", "expert"):
        model.get_submodule(EXPERT.rstrip(".")).requires_grad_(True)


def parameter_groups(model: nn.Module, settings: PolicyUpdateSettings) -> list[ParameterGroup]:
    """One for each of GROUPS, in that order; a value head is in none."""
    members: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith(VALUE_HEAD):
            members[group_of(name)].append(parameter)
    peaks = settings.learning_rates.model_dump()
    return [
        ParameterGroup(name, members[name], scheduled(peaks[name], settings), settings.weight_decay) for name in GROUPS
    ]


def scheduled(peak: float, settings: PolicyUpdateSettings) -> Callable[[float], float]:
    """The learning rate by the number of the update."""
    warmup, final = settings.warmup_steps, settings.final_lr_fraction
    decay = settings.decay_steps or settings.max_steps
    return lambda update: peak * warmup_cosine(update, warmup=warmup, decay=decay, final=final)


def group_of(name: str) -> str:
    """Of a parameter, by its name in the model."""
    if name.startswith(EXPERT):
        return "action_expert"
    if name.startswith(CONNECTOR) or name == f"{EMBEDDING}.new_embedding":
        return "connector"
    return "vit" if name.startswith(VISION) else "vlm"
