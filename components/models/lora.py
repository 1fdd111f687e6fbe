"""Low-rank adapters on exactly named linear layers, and the weights with the adapters merged in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.family import COMPONENTS, Family
from armature.components.models.nf4 import SCALES, NF4Linear
from armature.components.models.settings import LoraSettings

ALL_LINEARS = "all"


def target_modules(model: nn.Module, family: Family, settings: LoraSettings) -> list[str]:
    """Full names of the linear layers that get adapters; the output head gets one only where it is named.

    A bare name such as q_proj would also hit the vision tower of most families, hence full names.

    Raises:
        ConfigurationError: a target matches no linear layer within the scope.
    """
    components = COMPONENTS if settings.scope == "all" else ("language",)
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and family.component_of(name) in components
    ]
    if ALL_LINEARS in settings.targets:
        return [name for name in linears if not name.endswith("lm_head")]
    lasts = {name.rpartition(".")[2] for name in linears}
    for target in settings.targets:
        if target not in lasts:
            raise ConfigurationError(
                f"the adapter target {target!r} is not a linear layer of the {settings.scope} scope",
                code="unknown_adapter_target",
                where=f"model.lora.targets, family {family.name}",
                remedy=f"choose from {', '.join(sorted(lasts))}",
            )
    return [name for name in linears if name.rpartition(".")[2] in settings.targets]


def add_adapters(model: PreTrainedModel, family: Family, settings: LoraSettings, frozen: tuple[str, ...]) -> PeftModel:
    """Wrap `model`; only adapters are trainable, and those of frozen components are not."""
    names = [name for name in target_modules(model, family, settings) if family.component_of(name) not in frozen]
    if not names:
        raise ConfigurationError(
            "no linear layer is left for an adapter",
            code="no_layer_for_adapters",
            where=f"scope = {settings.scope}, freeze = {', '.join(frozen)}",
            remedy="freeze less, or widen model.lora.scope",
        )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied and any(name.endswith("lm_head") for name in names):
        raise ConfigurationError(
            "an adapter on a tied output head would untie it: servers have one matrix for both",
            code="tied_head_adapted",
            where="model.lora.targets",
            remedy="leave lm_head out, or use a checkpoint with tie_word_embeddings = false",
        )
    return get_peft_model(model, lora_config(names, settings.rank, settings.alpha))


def lora_config(names: list[str], rank: int, alpha: float, dropout: float = 0.0) -> LoraConfig:
    """Adapters on the layers of these full names: alpha / rank * B A dropout(x) is added to their output."""
    return LoraConfig(r=rank, lora_alpha=cast(int, alpha), lora_dropout=dropout, target_modules=names, bias="none")


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The Hugging Face model inside the adapters, or `model` itself."""
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


@torch.no_grad()
def adapter_weights(model: PeftModel, take: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What adds up to the adapters, each as `take` gives it, under the names that PEFT writes."""
    state = {name: take(value) for name, value in model.state_dict().items() if ".lora_" in name}
    return dict(get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False))


def layer_of(adapter: str) -> str:
    """The name of the weight, in the model without adapters, that the adapter of this name in PEFT's files adds to."""
    return adapter.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight"


def write_adapter(folder: Path, model: PeftModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` as PEFT reads them; equal adapters, equal bytes.

    The base model is not named: the folder that it was loaded from means nothing elsewhere.
    """
    (config,) = model.peft_config.values()
    facts = config.to_dict() | {"base_model_name_or_path": None, "inference_mode": True}
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(facts, indent=2, sort_keys=True, default=sorted) + "\n")
    tensors = {name: value.contiguous().cpu() for name, value in sorted(weights.items())}
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by their names in the model without adapters, each adapter added to its layer as it is asked for.

    Nothing is merged in place: subtracting an adapter again would not give back the same bits. The sum has the
    wider dtype of layer and adapter. Of a layer in 4 bits the weight is what it computes with.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    modules = dict(base.named_modules(remove_duplicate=False))
    for key, tensor in base.state_dict().items():
        name, _, own = key.rpartition(".")
        layer = modules[name]
        if ".lora_" in key or (isinstance(layer, NF4Linear) and own == SCALES):
            continue
        value = layer.dequantized() if isinstance(layer, NF4Linear) and own == "weight" else tensor
        adapted = modules.get(name.removesuffix(".base_layer"))
        if key.endswith(".base_layer.weight") and isinstance(adapted, LoraLayer):
            for adapter in adapted.active_adapters:
                value = value + adapted.get_delta_weight(adapter)
        yield key.replace(".base_layer.", "."), value


def weight_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Of the weights by their names in the model without adapters; of a layer in 4 bits the one it computes in."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    dtypes = {key: tensor.dtype for key, tensor in base.state_dict().items() if ".lora_" not in key}
    for name, layer in base.named_modules():
        if isinstance(layer, NF4Linear):
            del dtypes[f"{name}.{SCALES}"]
            dtypes[f"{name}.weight"] = layer.dtype
    return {key.replace(".base_layer.", "."): dtype for key, dtype in dtypes.items()}
