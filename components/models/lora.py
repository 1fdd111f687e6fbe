"""Low-rank adapters on exactly named linear layers, and the weights with the adapters merged in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.family import COMPONENTS, Family
from armature.components.models.blockwise import NF4
from armature.components.models.flash import TRITON
from armature.components.models.settings import LoraSettings

# Frozen weights in 4 bits under adapters (QLoRA, https://arxiv.org/abs/2305.14314).
#
# A weight is what its 4 bits stand for, rounded to the dtype of the model: with that the trainer computes, and that is
# what servers get. Quantized again it gives the same bits.

SCALES = "scales"


class NF4Linear(nn.Linear):
    """A frozen linear layer: `weight` (uint8, two codes in a byte, the first in its upper half) and `scales` (fp32).

    Nothing in 16 or 32 bits outlives a product: the backward pass makes the weight again.

    Args:
        layer: an even number of weights.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        indices, scales = NF4.quantize(layer.weight)
        pairs = indices.view(-1, 2)
        self.weight = nn.Parameter((pairs[:, 0] << 4) | pairs[:, 1], requires_grad=False)
        self.register_buffer(SCALES, scales)
        layer.requires_grad_(False)
        self.bias = layer.bias

    def dequantized(self) -> Tensor:
        """(out_features, in_features) in the dtype that the layer had."""
        shape = torch.Size((self.out_features, self.in_features))
        return _dequantized(self.weight, self.get_buffer(SCALES), shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = torch.Size((self.out_features, self.in_features))
        product: Tensor = _Product.apply(x, self.weight, self.get_buffer(SCALES), self.bias, shape, self.dtype)
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.weight = shape, dtype
        return linear(
            x, _dequantized(packed, scales, shape, dtype).to(x.dtype), None if bias is None else bias.to(x.dtype)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return gradient @ _dequantized(*ctx.saved_tensors, *ctx.weight).to(gradient.dtype), None, None, None, None, None


def _dequantized(packed: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if packed.is_cuda and TRITON:
        from armature.components.models.kernels import dequantize

        return dequantize(packed, scales, dtype).view(shape)
    indices = torch.stack((packed >> 4, packed & 15), dim=-1)
    return NF4.dequantize(indices, scales, dtype).view(shape)


def quantized_layers(model: PreTrainedModel, family: Family) -> Iterator[tuple[str, nn.Linear]]:
    """Names and layers that get 4 bits: those of the language model, but its output head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and family.component_of(name) == "language":
            yield name, module


def quantize(model: PreTrainedModel, family: Family, device: str | torch.device) -> None:
    """Replace these layers, one after the other, by ones in 4 bits on `device`."""
    for name, layer in list(quantized_layers(model, family)):
        model.set_submodule(name, NF4Linear(layer.to(device)))


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
