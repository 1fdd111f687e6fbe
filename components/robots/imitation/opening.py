"""Open a policy's model for training: load or shard it, freeze parts, add adapters, and group its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

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
from armature.components.robots.policies.family import CheckpointParts, family, load_model, refuse_sharding
from armature.components.robots.policies.model import PolicyModel
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.settings import Semantics
from armature.components.training.engine import ParameterGroup
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks, whole
from armature.components.training.schedule import warmup_cosine
from armature.components.training.sharding import Unit, sharder

# --- Sharding over ranks ---


def units(model: MolmoAct2, precision: str) -> Iterator[Unit]:
    """Yield the modules that FSDP shards and gathers as units, with the dtype in which their weights are gathered.

    With `precision` "bfloat16" the VLM is gathered and computes in bfloat16; the action expert stays in float32, as in
    a single process. The action expert is one unit, because its context projections are used between its blocks.
    Every weight is in a module that sampling calls, or in the action expert, so that a policy can predict without the
    root's forward pass.
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
def whole_expert(model: PolicyModel) -> Iterator[None]:
    """Keep the weights of a sharded action expert gathered inside the `with` block.

    Sampling needs this, because it calls parts of the expert, and FSDP only gathers weights when the whole is called.
    """
    expert = model.action_expert
    if not isinstance(expert, FSDPModule):
        yield
        return
    expert.unshard()
    try:
        yield
    finally:
        expert.reshard()


Model = TypeVar("Model", bound=PolicyModel)


@dataclass(frozen=True)
class OpenedModel(Generic[Model]):
    """A model prepared for training.

    model: on the CPU, or on the meta device if it will be sharded.
    named: on the first rank of a sharded training, a copy of the model with its shapes, dtypes and gradient flags;
        everywhere else, `model` itself.
    weights: on the first rank of a sharded training, the weights by name; everywhere else, None.
    shard: function that shards `model` and loads each rank's shards; None: each rank has the whole model.
    dtypes: dtypes of the checkpoint's weights.
    """

    model: Model
    named: Model
    weights: Mapping[str, Tensor] | None
    shard: Callable[[Model], None] | None
    dtypes: Mapping[str, torch.dtype]

    def publish(self, folder: Path, parts: CheckpointParts, ranks: Ranks) -> None:
        """Write the policy to `folder`; all ranks must call this method.

        Adapters are merged, and each weight has the dtype that it had in the loaded checkpoint.
        """
        merged = merged_weights(self.model)
        weights = {name: whole(value).to(self.dtypes.get(name, value.dtype)) for name, value in merged}
        if ranks.first:
            family(parts.settings.family).save_policy(folder, parts, weights)


def open_model(
    source: Path,
    parts: CheckpointParts,
    prepare: Callable[[Model], object],
    processes: TrainerProcesses,
    ranks: Ranks,
) -> OpenedModel[Model]:
    """Load a policy's model for training, or prepare it for sharding.

    Args:
        prepare: Function that freezes a model and adds adapters or a value head; called before sharding.

    Raises:
        ConfigurationError: context or expert parallelism is enabled.
        DataError: a weight is missing, unknown, or has another shape.
    """
    if ranks.context is not None:
        raise ConfigurationError(
            "context parallelism is only supported for vision-language models, not for robot policies",
            code="context_parallel_unsupported",
            where="machine.trainer.context_parallel",
            remedy="remove this setting",
        )
    if processes.sharding == "experts":
        raise ConfigurationError(
            "robot policies have no experts that could be divided among ranks",
            code="experts_missing",
            where='machine.trainer.sharding = "experts"',
            remedy='set machine.trainer.sharding = "full"',
        )
    kind, sharded = family(parts.settings.family), processes.sharding is not None
    refuse_sharding(parts.settings.family, processes)
    model: Model = kind.empty_model(parts) if sharded else load_model(source, parts)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    prepare(model)
    if not sharded:
        return OpenedModel(model, model, None, None, dtypes)
    named, weights = model, None
    if ranks.first:
        named, stored = kind.read_model(source, parts)
        prepare(named)
        weights = MappedWeights(named, stored)
    cut = partial(units, precision=parts.settings.dtype)
    methods = ("velocities", "answer_logits")
    shard = sharder(ranks, processes.copies, cut, weights, cast_inputs=False, methods=methods)
    return OpenedModel(model, named, weights, shard, dtypes)


# --- Trained parts: adapters, frozen weights and parameter groups ---


def add_adapters(
    model: nn.Module, chosen: Callable[[str], bool], settings: AdapterSettings, seed: int, dropout: float = 0.0
) -> list[str]:
    """Add a low-rank adapter to each linear layer whose name `chosen` accepts, and freeze all other parameters.

    Returns the names of these layers. An adapter has two float32 matrices: A, (rank, in), starts as normal noise of
    standard deviation 1 / rank; B, (out, rank), starts as zeros.

    Raises:
        ConfigurationError: `chosen` accepts no linear layer.
    """
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and chosen(name)]
    if not names:
        raise ConfigurationError(
            "the model has no linear layer to add an adapter to", code="no_layer_for_adapters", where="training.mode"
        )
    inject_adapter_in_model(lora_config(names, settings.rank, settings.alpha, dropout), model)
    random = torch.Generator().manual_seed(seed)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, LoraLayer)
        if isinstance(model, PolicyModel) and model.precision == "bfloat16":
            layer.cast_input_dtype_enabled = False  # autocast computes in bfloat16 and would cast a float32 copy back
        down, up = layer.lora_A["default"].float(), layer.lora_B["default"].float()
        with torch.no_grad():
            down.weight.copy_(torch.randn(down.weight.shape, generator=random) / settings.rank)
            up.weight.zero_()
    return names


EXPERT = "action_expert."
VALUE_HEAD = "value_head."
VISION = ("vlm.model.vision_tower.", "vlm.model.vision_model.")
CONNECTOR = (
    *("vlm.model.multi_modal_projector.", "vlm.model.language_model.embed_tokens.new_embedding"),
    "vlm.model.connector.",
)
GROUPS = ("vlm", "vit", "connector", "action_expert")


def prepare(model: PolicyModel, settings: PolicyUpdateSettings, semantics: Semantics) -> None:
    """Freeze parts of `model` and add adapters to it, as `settings.mode` requires.

    Afterwards, exactly the parameters to train require gradients.

    Args:
        semantics: See `PolicyModel.embeddings`.
    """
    model.requires_grad_(settings.mode == "full")
    if settings.mode == "full" and settings.freeze_embedding:
        for name in model.embeddings(semantics):
            model.get_parameter(name).requires_grad_(False)
    if settings.lora is not None:
        expert_too = settings.mode == "lora_expert"
        dropout = settings.lora_dropout if isinstance(settings, VLATrainerSettings) else 0.0
        left_out = (*model.untrained, *(() if expert_too else (EXPERT,)))
        add_adapters(model, lambda name: not name.startswith(left_out), settings.lora, settings.seed, dropout)
    if settings.mode in ("lora", "expert"):
        model.get_submodule(EXPERT.rstrip(".")).requires_grad_(True)
    for name, parameter in model.named_parameters():
        if name.startswith(model.untrained):
            parameter.requires_grad_(False)


def place(model: Model, settings: PolicyUpdateSettings, ranks: Ranks, shard: Callable[[Model], None] | None) -> None:
    """Compile the layers of a prepared model if its settings ask for it, and bring it to the devices of the ranks.

    Args:
        shard: splits a model on the meta device over the ranks; None: the whole model goes to this rank's device.
    """
    if settings.torch_compile:
        model.compile_layers(dynamic=True, split=shard is not None)
    if shard is not None:
        shard(model)
        return
    model.to(ranks.device)
    if settings.mode == "expert":
        model.freeze_vlm(ranks.device)


def parameter_groups(model: nn.Module, settings: PolicyUpdateSettings) -> list[ParameterGroup]:
    """Return one group of trained parameters for each name in GROUPS, in this order.

    Parameters of a value head are left out.
    """
    members: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith(VALUE_HEAD):
            members[group_of(name)].append(parameter)
    peaks = settings.learning_rates.model_dump()
    return [
        ParameterGroup(name, members[name], scheduled(peaks[name], settings), settings.weight_decay) for name in GROUPS
    ]


def scheduled(peak: float, settings: PolicyUpdateSettings) -> Callable[[float], float]:
    """Return a function from an update's number to its learning rate, with warmup to `peak` and cosine decay."""
    warmup, final = settings.warmup_steps, settings.final_lr_fraction
    decay = settings.decay_steps or settings.max_steps
    return lambda update: peak * warmup_cosine(update, warmup=warmup, decay=decay, final=final)


def group_of(name: str) -> str:
    """Return the name, one of GROUPS, of the group that the parameter `name` belongs to."""
    if name.startswith(EXPERT):
        return "action_expert"
    if name.startswith(CONNECTOR):
        return "connector"
    return "vit" if name.startswith(VISION) else "vlm"
