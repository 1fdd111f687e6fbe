"""Low-rank adapters in a policy, whose other modules stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from armature.components.contracts.errors import ConfigurationError
from armature.components.models.lora import lora_config
from armature.components.models.settings import AdapterSettings
from armature.components.robots.imitation.settings import PolicyUpdateSettings, VLATrainerSettings
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.settings import Semantics
from armature.components.training.engine import ParameterGroup
from armature.components.training.schedule import warmup_cosine


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


# What of a policy is trained, and in which parameter group.

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
