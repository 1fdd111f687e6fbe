"""Low-rank adapters on named linear layers, 4-bit frozen weights below them, and the weights with adapters merged
in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, transformers_weight_conversion
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.family import COMPONENTS, Family
from armature.components.models.blockwise import NF4
from armature.components.models.flash import TRITON
from armature.components.models.settings import LoraSettings

SCALES = "scales"
"""Name of the buffer with the block scales of a 4-bit weight."""


class NF4Linear(nn.Linear):
    """A frozen linear layer with a 4-bit weight, used under adapters (QLoRA, https://arxiv.org/abs/2305.14314).

    `weight` (uint8) has two codes per byte, the first one in the upper half; `scales` is in fp32. The dequantized
    weight, rounded to the model's dtype, is what the trainer computes with and what servers get; quantizing it again
    gives the same bits. It is recomputed in the backward pass, so nothing in 16 or 32 bits is kept.

    Args:
        layer: the layer to replace, with an even number of weights.
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
        """The weight (out_features, in_features), in the dtype of the replaced layer."""
        shape = torch.Size((self.out_features, self.in_features))
        return _dequantized(self.weight, self.get_buffer(SCALES), shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = torch.Size((self.out_features, self.in_features))
        product: Tensor = _Product.apply(x, self.weight, self.get_buffer(SCALES), self.bias, shape, self.dtype)
        return product


class _Product(torch.autograd.Function):
    """Product of an input with a 4-bit weight. The weight is dequantized in the forward pass and again in the backward
    pass."""

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
    """Dequantize a weight to this shape and dtype, given its packed codes and its scales."""
    if packed.is_cuda and TRITON:
        from armature.components.models.kernels import dequantize

        return dequantize(packed, scales, dtype).view(shape)
    indices = torch.stack((packed >> 4, packed & 15), dim=-1)
    return NF4.dequantize(indices, scales, dtype).view(shape)


def quantized_layers(model: PreTrainedModel, family: Family) -> Iterator[tuple[str, nn.Linear]]:
    """Yield name and layer of each linear layer that gets 4-bit weights: all of the language model but its output
    head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and family.component_of(name) == "language":
            yield name, module


def quantize(model: PreTrainedModel, family: Family, device: str | torch.device) -> None:
    """Replace the layers of `quantized_layers` by 4-bit ones on `device`, one after the other."""
    for name, layer in list(quantized_layers(model, family)):
        model.set_submodule(name, NF4Linear(layer.to(device)))


ALL_LINEARS = "all"
"""Value of a target setting that selects every linear layer except the output head."""


def target_modules(model: nn.Module, family: Family, settings: LoraSettings) -> list[str]:
    """Return the full names of the linear layers that get adapters. The output head gets one only if it is named.

    Full names are used since a bare name such as q_proj would also match the vision tower of most families.

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
    """Wrap `model` in adapters. Only these are trainable, and frozen components get none.

    Raises:
        ConfigurationError: no layer is left for an adapter, or an adapter is on an output head that is tied to the
            input embeddings.
    """
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
            "an adapter on a tied output head would change the input embeddings too: servers have one matrix for both",
            code="tied_head_adapted",
            where="model.lora.targets",
            remedy="leave lm_head out, or use a checkpoint with tie_word_embeddings = false",
        )
    with _exact_names():
        return get_peft_model(model, lora_config(names, settings.rank, settings.alpha))


@contextmanager
def _exact_names() -> Iterator[None]:
    """Let PEFT (0.21) take names of layers as they are during the block.

    In some mixtures of experts it would take the feed-forward layers of a shared expert for the routed experts.
    """
    patterns = transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN
    before = dict(patterns)
    patterns.clear()
    try:
        yield
    finally:
        patterns.update(before)


def lora_config(names: list[str], rank: int, alpha: float, dropout: float = 0.0) -> LoraConfig:
    """Return PEFT's configuration of adapters on these layers: alpha / rank * B A dropout(x) is added to each
    output."""
    return LoraConfig(r=rank, lora_alpha=cast(int, alpha), lora_dropout=dropout, target_modules=names, bias="none")


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The Hugging Face model inside the adapters, or `model` itself if it has none."""
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


@torch.no_grad()
def adapter_weights(model: PeftModel, take: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapters' tensors by the names that PEFT writes.

    Args:
        take: is applied to each tensor, e.g. to gather it from all ranks.
    """
    state = {name: take(value) for name, value in model.state_dict().items() if ".lora_" in name}
    return dict(get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False))


def layer_of(adapter: str) -> str:
    """Return the name of the weight that an adapter tensor changes. `adapter` is the tensor's PEFT name; the weight's
    name is the one in the model without adapters."""
    return adapter.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight"


def write_adapter(folder: Path, model: PeftModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` in PEFT's format. Equal adapters give equal bytes.

    The base model's folder is not recorded, since it exists on this machine only.
    """
    (config,) = model.peft_config.values()
    facts = config.to_dict() | {"base_model_name_or_path": None, "inference_mode": True}
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(facts, indent=2, sort_keys=True, default=sorted) + "\n")
    tensors = {name: value.contiguous().cpu() for name, value in sorted(weights.items())}
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each weight of the model without adapters, with the adapters added.

    Nothing is merged in place: subtracting an adapter again would not restore the same bits. The sum has the wider
    dtype of layer and adapter. The weight of a 4-bit layer is the dequantized one.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    modules = dict(base.named_modules(remove_duplicate=False))
    for key, tensor in base.state_dict().items():
        name, _, attribute = key.rpartition(".")
        layer = modules[name]
        if ".lora_" in key or (isinstance(layer, NF4Linear) and attribute == SCALES):
            continue
        value = layer.dequantized() if isinstance(layer, NF4Linear) and attribute == "weight" else tensor
        adapted = modules.get(name.removesuffix(".base_layer"))
        if key.endswith(".base_layer.weight") and isinstance(adapted, LoraLayer):
            for adapter in adapted.active_adapters:
                value = value + adapted.get_delta_weight(adapter)
        yield key.replace(".base_layer.", "."), value


def weight_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each weight, by its name in the model without adapters. For a 4-bit layer it is the dtype of
    the dequantized weight."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    dtypes = {key: tensor.dtype for key, tensor in base.state_dict().items() if ".lora_" not in key}
    for name, layer in base.named_modules():
        if isinstance(layer, NF4Linear):
            del dtypes[f"{name}.{SCALES}"]
            dtypes[f"{name}.weight"] = layer.dtype
    return {key.replace(".base_layer.", "."): dtype for key, dtype in dtypes.items()}
