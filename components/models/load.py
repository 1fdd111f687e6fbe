"""Load a model by family, freeze components, add adapters, and save checkpoints that vLLM can load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import set_tqdm_hook

from armature.components.artifacts.tensors import new_checkpoint_folder, read_tensors
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign
from armature.components.families.family import Family, family_of
from armature.components.families.smolvlm import make_num2words_optional
from armature.components.models.attention import apply_image_attention, check_image_attention
from armature.components.models.experts import routers
from armature.components.models.flash import is_installed
from armature.components.models.grouped import GROUPED
from armature.components.models.lora import add_adapters, base_model, merged_weights, quantize
from armature.components.models.molmo2 import has_hub_layout, to_hub
from armature.components.models.settings import ModelSettings, Recomputation
from armature.components.models.source import local_code_options, locate
from armature.components.models.varlen import choose_kernels, complete_processor, is_remote, register_body

Model = TypeVar("Model", bound=nn.Module)
_PEFT = "base_model.model."
"""Prefix of all weight names inside a PEFT model."""


def without_storage(model: Model) -> Model:
    """Replace each tensor on the meta device by a CPU tensor that needs no memory: one number, expanded to the tensor's
    shape. Return the model.

    Real layers can be added to the model; their random numbers are the same as in a whole model.
    """
    model._apply(lambda t: torch.empty((), dtype=t.dtype).expand(t.shape) if t.is_meta else t)
    return model


class MappedWeights(Mapping[str, Tensor]):
    """All parameters and buffers of a model by name, in the model's dtypes, read from mapped files one at a time.

    Args:
        model: a model made by `without_storage`, possibly with adapters added since.
        stored: the files' tensors by their names without adapters, in any dtype. Views of mapped files take no memory.
        attribute: prefix for the names, if they are wanted as in a module that has the model as this attribute.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, Tensor], attribute: str = "") -> None:
        self._model, self._stored = model, stored
        self._state = model.state_dict(prefix=f"{attribute}." if attribute else "")
        self._prefix = (f"{attribute}." if attribute else "") + (_PEFT if isinstance(model, PeftModel) else "")

    def of(self, attribute: str) -> MappedWeights:
        """Return the same weights under other names: the names they have in a module whose `attribute` is the model."""
        return MappedWeights(self._model, self._stored, attribute)

    def __getitem__(self, name: str) -> Tensor:
        value = self._state[name]
        stored = self._stored.get(name.removeprefix(self._prefix).replace(".base_layer.", "."))
        return value if stored is None else stored.to(value.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


_DEPTH = re.compile(r"(n|num|num_hidden)_(hidden_)?layers|depth")
"""Pattern of the configuration keys whose value is a number of layers."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RECOMPUTATION = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
"""Options for recomputing activations. Layers have no dropout, so no random state has to be restored."""


def load_config(source: str | Path, settings: ModelSettings) -> PreTrainedConfig:
    """Load the configuration of a folder, a hub name or a model artifact.

    Raises:
        DataError: there is no readable configuration.
        ConfigurationError: the family is unknown, or the image attention is not the one in the settings.
    """
    folder, options = locate(source, settings.revision), local_code_options(settings.trust_remote_code)
    remedy = "name a folder with a config.json of a vision-language model, or a hub name with its revision"
    with foreign("no model configuration can be read", where=str(source), remedy=remedy):
        config = AutoConfig.from_pretrained(folder, **options)
    family_of(config)
    check_image_attention(config, settings.image_attention, settings.attn_implementation)
    return config


def load_processor(source: str | Path, settings: ModelSettings) -> ProcessorMixin:
    """Load the processor (tokenizer, image processor, chat template) of a folder, a hub name or a model artifact.

    Code from the checkpoint is trusted if the model's is.

    Raises:
        DataError: the processor cannot be loaded, or takes no images because it is only a tokenizer.
    """
    make_num2words_optional()
    options = local_code_options(settings.trust_remote_code)
    remedy = "add the model's processor files to the folder; if they need code from the checkpoint, trust it by "
    remedy += "model.trust_remote_code = true"
    with foreign("no processor can be loaded", where=str(source), remedy=remedy):
        processor = AutoProcessor.from_pretrained(locate(source, settings.revision), **options)
    if getattr(processor, "image_processor", None) is None:
        raise DataError(
            f"{type(processor).__name__} takes no images",
            code="image_processor_missing",
            where=str(source),
            remedy=remedy,
        )
    if is_remote(processor):
        complete_processor(processor, family_of(load_config(source, settings)))
    return processor


def load_model(
    source: str | Path, settings: ModelSettings, device: str | torch.device = "cpu", *, empty: bool = False
) -> PreTrainedModel:
    """Load the model onto `device` in evaluation mode, with its frozen components and its adapters.

    With `settings.lora` the result is a PEFT model. Only its adapters are trainable, and frozen components get none.
    Gradient checkpointing "auto" means off here; the trainer decides about it before.

    Args:
        empty: leave parameters on the meta device, without memory, for a caller that fills them otherwise.

    Raises:
        ConfigurationError: the family is unknown, flash-attn is not installed, an adapter target matches no layer, or
            `empty` is combined with 4-bit weights.
        DataError: the weights do not fit the configuration.

    Example:
        >>> import tempfile
        >>> from armature.components.models.tiny import make_tiny_checkpoint
        >>> folder = make_tiny_checkpoint("llava", Path(tempfile.mkdtemp()) / "model")
        >>> model = load_model(folder, ModelSettings(source=str(folder), dtype="float32", freeze=("vision",)))
        >>> type(model).__name__
        'LlavaForConditionalGeneration'
    """
    config = load_config(source, settings)
    _check_attention(settings.attn_implementation)
    if empty:
        _check_not_quantized(settings)
    dtype = DTYPES[settings.dtype]
    model = _empty_model(config, settings) if empty else _load_weights(config, source, settings, dtype)
    if settings.attn_implementation == "auto":
        choose_kernels(model)
    apply_image_attention(model)
    register_body(model)
    model = _freeze_and_adapt(model, settings, device)
    recompute_activations(model, settings.gradient_checkpointing)
    return (model if empty else model.to(device)).eval()


def recompute_activations(model: Any, share: Recomputation = True) -> None:
    """Recompute activations in the backward pass, in the first layers of the language model and of the vision tower.

    The backward pass begins with the last layers, which therefore keep their activations: they are freed before it
    computes activations of the first layers again.

    Args:
        model: a transformers model, with or without adapters.
        share: part of the layers that recompute; the others keep their activations. False changes nothing, and neither
            does "auto", which is not resolved yet.
    """
    if not share or share == "auto":
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=RECOMPUTATION)
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            for layer in list(stack)[recomputed_layers(share, len(stack)) :]:
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.gradient_checkpointing = False


def recomputed_layers(share: float, layers: int) -> int:
    """Return how many of `layers` layers recompute their activations: at least one, if the share is above 0.

    Example:
        >>> recomputed_layers(0.25, 28), recomputed_layers(0.01, 28), recomputed_layers(0, 28)
        (7, 1, 0)
    """
    return max(1, round(share * layers)) if share else 0


def read_model(source: str | Path, settings: ModelSettings) -> tuple[PreTrainedModel, MappedWeights]:
    """Return the same model as `load_model`, but without memory for its weights, and a mapping that reads the weights
    one tensor at a time.

    The weights are bit for bit the same. They stay in the mapped files, except weights of files with several dtypes and
    tensors that transformers assembles from several stored ones.

    Raises:
        ConfigurationError, DataError: see `load_model`; or the weights are quantized.
    """
    _check_not_quantized(settings)
    config = load_config(source, settings)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigurationError(
            "a model with quantized weights cannot be split over ranks",
            code="quantization_not_split",
            where=str(source),
            remedy="train it on one GPU, or use a checkpoint in bfloat16",
        )
    kinds = {kind for kind, _ in read_tensors(locate(source, settings.revision)).values()} & FLOATS.keys()
    dtype = FLOATS[kinds.pop()] if len(kinds) == 1 else torch.float32  # MappedWeights casts later
    stored = _load_weights(config, source, settings, dtype).state_dict()
    with torch.random.fork_rng(devices=()):  # adapters then get the same random numbers as in a whole model
        model = without_storage(_empty_model(config, settings))
    for tensor in kept_in_fp32(model):  # as from_pretrained does
        tensor.data = tensor.data.float()
    model = _freeze_and_adapt(model, settings)
    return model, MappedWeights(model, stored)


def kept_in_fp32(model: PreTrainedModel) -> list[Tensor]:
    """Return the parameters and buffers that transformers loads in fp32 whatever the model's dtype, such as the routers
    of GLM's mixtures of experts."""
    parts = [f".{part}." for part in model._keep_in_fp32_modules_strict]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [tensor for name, tensor in tensors if any(part in f".{name}." for part in parts)]


def _check_not_quantized(settings: ModelSettings) -> None:
    """Raise a ConfigurationError if the model is in 4 bits, which cannot be split over ranks."""
    if settings.quantization is not None:
        raise ConfigurationError(
            "a model with 4-bit weights cannot be split over ranks",
            code="quantization_not_split",
            where="model.quantization, machine.trainer.sharding",
            remedy="train it in one process, or leave model.quantization out",
        )


def _freeze_and_adapt(
    model: PreTrainedModel, settings: ModelSettings, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Freeze components, quantize and add adapters, as the settings say."""
    family = family_of(model.config)
    freeze(model, family, settings.freeze, settings.train_routers)
    if settings.quantization is not None:
        quantize(model, family, device)
    return add_adapters(model, family, settings.lora, settings.freeze) if settings.lora is not None else model


def _load_weights(
    config: PreTrainedConfig, source: str | Path, settings: ModelSettings, dtype: torch.dtype
) -> PreTrainedModel:
    """Load the weights from the files, and check that they fit the configuration."""
    check_sizes(config, locate(source, settings.revision))
    with foreign("the model cannot be loaded", where=str(source)):
        model, report = AutoModelForImageTextToText.from_pretrained(
            locate(source, settings.revision),
            dtype=dtype,
            attn_implementation=_implementation(config, settings),
            experts_implementation=GROUPED,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_weights` reports them with a remedy
            **local_code_options(settings.trust_remote_code),
        )
    _check_weights(report, source)
    return model


def _empty_model(config: PreTrainedConfig, settings: ModelSettings) -> PreTrainedModel:
    """Build the model with parameters on the meta device. Buffers are real, since files have no values for some, such
    as rotary frequencies."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForImageTextToText.from_config(
            config,
            dtype=DTYPES[settings.dtype],
            attn_implementation=_implementation(config, settings),
            experts_implementation=GROUPED,
            trust_remote_code=is_remote(config),
        )


def freeze(model: PreTrainedModel, family: Family, components: tuple[str, ...], train_routers: bool = False) -> None:
    """Disable gradients of all parameters of the named components, and of the routers of experts unless they are
    trained. Other parameters are not changed.

    Raises:
        ConfigurationError: routers should be trained, but the model has none.
    """
    for name, parameter in model.named_parameters():
        if family.component_of(name) in components:
            parameter.requires_grad_(False)
    if train_routers and not routers(model):
        raise ConfigurationError(
            f"{family.name} has no routers to train",
            code="experts_missing",
            where="model.train_routers",
            remedy="leave it out, or use a mixture of experts",
        )
    for router in routers(model).values():
        router.requires_grad_(train_routers)


def save_checkpoint(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    folder: Path,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write safetensors, configuration and processor in the Hugging Face layout, with adapters merged into the weights.

    Readers of `folder` see the previous checkpoint or the new one, never a mixture.

    Args:
        weights: weights to write, by their names in the model without adapters; a sharded trainer passes the gathered
            ones. None: the model's own weights.

    Raises:
        StoreError: the checkpoint could not be written, as on a full disk.
    """
    base, state = base_model(model), dict(merged_weights(model) if weights is None else weights)
    convert = has_hub_layout(base.config) and not is_remote(base)  # remote code uses the files' names already
    with new_checkpoint_folder(folder) as new, _without_bars():
        if convert:  # transformers itself would write a wrong embedding, see molmo2.py
            base.save_pretrained(new, state_dict=to_hub(state, base.config), save_original_format=False)
        else:
            base.save_pretrained(new, state_dict=state)
        processor.save_pretrained(new)
    return folder


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers: a training that saves after every step would print one each time."""
    previous = set_tqdm_hook(lambda factory, arguments, options: factory(*arguments, **(options | {"disable": True})))
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _implementation(config: PreTrainedConfig, settings: ModelSettings) -> str | dict[str, str]:
    """Return the name of the attention implementation with which transformers loads the model. `choose_kernels` may
    change it afterwards. An audio tower, which is never run, has no other implementation than "eager"."""
    name = "sdpa" if settings.attn_implementation == "auto" else settings.attn_implementation
    return {"": name, "audio_config": "eager"} if getattr(config, "audio_config", None) is not None else name


def _check_attention(implementation: str) -> None:
    """Raise a ConfigurationError if flash_attention_2 is chosen but flash-attn is not installed."""
    if implementation == "flash_attention_2" and not is_installed("flash-attn"):
        raise ConfigurationError(
            "flash_attention_2 needs the package flash-attn, which is not installed",
            code="flash_attention_missing",
            where="model.attn_implementation",
            remedy="install flash-attn on a machine with a GPU, or leave attn_implementation out",
        )


def check_sizes(config: PreTrainedConfig, folder: Path) -> None:
    """Check that the model described by config.json is not larger than the weights, before memory is allocated for it.

    Raises:
        DataError: the model is larger, config.json describes no model that can be built, or the weights cannot be read.
    """
    tensors = read_tensors(folder)
    stored = sum(math.prod(shape) for _, shape in tensors.values())
    remedy = "use a checkpoint whose weights belong to its config.json"
    depth = max((value for key, value in _numbers(config.to_dict()) if _DEPTH.fullmatch(key)), default=0)
    if depth > len(tensors):
        raise DataError(
            f"config.json describes {depth} layers, but the weights have only {len(tensors)} tensors",
            code="weights_mismatch",
            where=str(folder),
            remedy=remedy,
        )
    with foreign("no model can be built", where=f"{folder}/config.json", remedy=remedy), torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=is_remote(config))
    needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > stored:
        raise DataError(
            f"config.json describes a model with {needed:,} parameters, but the weights have only {stored:,}",
            code="weights_mismatch",
            where=str(folder),
            remedy=remedy,
        )


def _numbers(document: Any) -> Iterator[tuple[str, int]]:
    """Yield the key and value of every integer in a configuration, including nested ones."""
    for key, value in document.items() if isinstance(document, dict) else ():
        if type(value) is int:
            yield str(key), value
        yield from _numbers(value)


def _check_weights(report: Mapping[str, Any], source: str | Path) -> None:
    """Raise a DataError if weights are missing, superfluous or of another shape. Otherwise transformers fills gaps with
    random weights."""
    kinds = {"missing": "missing_keys", "not in the model": "unexpected_keys", "of another shape": "mismatched_keys"}
    differing = {kind: sorted(map(str, report[keys])) for kind, keys in kinds.items()}
    if any(differing.values()):
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in differing.items() if names)
        raise DataError(
            f"config.json and weights disagree: {counts}, first: {next(filter(None, differing.values()))[0]}",
            code="weights_mismatch",
            where=str(source),
            remedy="use a checkpoint whose weights belong to its config.json",
        )
