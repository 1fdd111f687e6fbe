"""Load a model by family, freeze components, add adapters, and save what vLLM can load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
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

from armature.components.artifacts.tensors import checkpoint_folder, read_tensors
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign
from armature.components.families.family import Family, family_of
from armature.components.models.attention import apply_image_attention, check_image_attention
from armature.components.models.flash import is_installed
from armature.components.models.lora import add_adapters, base_model, merged_weights, quantize
from armature.components.models.molmo2 import has_hub_layout, to_hub
from armature.components.models.settings import ModelSettings
from armature.components.models.source import local_code_options, locate
from armature.components.models.varlen import choose_kernels, complete_processor, is_remote, register_body

# Weights that stay in their files until they are asked for, one at a time.

Model = TypeVar("Model", bound=nn.Module)
_PEFT = "base_model.model."


def without_storage(model: Model) -> Model:
    """`model`, from the meta device, on the CPU: its tensors have shapes and dtypes, and one number each in memory.

    Layers can be added to it that are real, with the random numbers that they would have had in a whole model.
    """
    model._apply(lambda t: torch.empty((), dtype=t.dtype).expand(t.shape) if t.is_meta else t)
    return model


class MappedWeights(Mapping[str, Tensor]):
    """All parameters and buffers of a model by name, in its dtypes.

    Args:
        model: one that `without_storage` made, which may have got adapters since.
        stored: what the files have for it, by the names without adapters, in any dtype. Views of mapped files take no
            memory of their own.
        attribute: of a module around the model, whose names are wanted; empty: the model's own.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, Tensor], attribute: str = "") -> None:
        self._model, self._stored = model, stored
        self._own = model.state_dict(prefix=f"{attribute}." if attribute else "")
        self._prefix = (f"{attribute}." if attribute else "") + (_PEFT if isinstance(model, PeftModel) else "")

    def of(self, attribute: str) -> MappedWeights:
        """The same by the names in a module that has the model as `attribute`."""
        return MappedWeights(self._model, self._stored, attribute)

    def __getitem__(self, name: str) -> Tensor:
        own = self._own[name]
        stored = self._stored.get(name.removeprefix(self._prefix).replace(".base_layer.", "."))
        return own if stored is None else stored.to(own.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


_DEPTH = re.compile(r"(n|num|num_hidden)_(hidden_)?layers|depth")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RECOMPUTATION = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
"""How layers recompute their activations: without dropout there is nothing random to repeat."""


def load_config(source: str | Path, settings: ModelSettings) -> PreTrainedConfig:
    """The configuration of a folder, a hub name or a model artifact.

    Raises:
        DataError: there is no readable configuration.
        ConfigurationError: the model is of no known family, or attends to images otherwise than it is to.
    """
    folder, options = locate(source, settings.revision), local_code_options(settings.trust_remote_code)
    remedy = "give a folder with a config.json of a vision-language model, or a hub name with its revision"
    with foreign("no model configuration can be read", where=str(source), remedy=remedy):
        config = AutoConfig.from_pretrained(folder, **options)
    family_of(config)
    check_image_attention(config, settings.image_attention, settings.attn_implementation)
    return config


def load_processor(source: str | Path, settings: ModelSettings) -> ProcessorMixin:
    """The processor (tokenizer, image processor, chat template) of a folder, a hub name or a model artifact.

    Its code is trusted exactly if the model's is.

    Raises:
        DataError: it cannot be loaded, or takes no images, as a tokenizer alone.
    """
    options = local_code_options(settings.trust_remote_code)
    remedy = "complete the folder with the model's processor files; if they need code of their own, trust it by "
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
    """The model on `device`, in evaluation mode, with its frozen components and its adapters.

    With `settings.lora` it is a PEFT model whose adapters alone, and nothing frozen, are trainable. Gradient
    checkpointing "auto" is off: who trains chooses before.

    Args:
        empty: parameters are on the meta device and take no memory, for one that gets them from elsewhere.

    Raises:
        ConfigurationError: unknown family, flash-attn is not installed, an adapter target matches nothing, or a model
            in 4 bits is to be empty.
        DataError: the weights do not belong to the configuration.
    """
    config = load_config(source, settings)
    _check_attention(settings.attn_implementation)
    if empty:
        _refuse_split(settings)
    dtype = DTYPES[settings.dtype]
    model = _empty(config, settings) if empty else _loaded(config, source, settings, dtype)
    if settings.attn_implementation == "auto":
        choose_kernels(model)
    apply_image_attention(model)
    register_body(model)
    model = _frozen_and_adapted(model, settings, device)
    if settings.gradient_checkpointing is True:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=RECOMPUTATION)
    return (model if empty else model.to(device)).eval()


def read_model(source: str | Path, settings: ModelSettings) -> tuple[PreTrainedModel, MappedWeights]:
    """What `load_model` loads, for who needs one tensor at a time: a model without memory for them, and its weights.

    The weights stay in their files, which are mapped, and are the same bits. Those of files with several dtypes take
    memory, as do tensors that transformers puts together from several.

    Raises:
        ConfigurationError, DataError: as `load_model`, or the weights are quantized.
    """
    _refuse_split(settings)
    config = load_config(source, settings)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigurationError(
            "a model with quantized weights cannot be split over ranks",
            code="quantization_not_split",
            where=str(source),
            remedy="train it on one GPU, or give a checkpoint in bfloat16",
        )
    kinds = {kind for kind, _ in read_tensors(locate(source, settings.revision)).values()} & FLOATS.keys()
    dtype = FLOATS[kinds.pop()] if len(kinds) == 1 else torch.float32  # any other is rounded in the same way later
    stored = _loaded(config, source, settings, dtype).state_dict()
    with torch.random.fork_rng(devices=()):  # so that adapters have the numbers that they have in a whole model
        model = without_storage(_empty(config, settings))
    for name, module in model.named_modules():
        if not model._keep_in_fp32_modules_strict.isdisjoint(name.split(".")):  # as from_pretrained does
            module.float()
    model = _frozen_and_adapted(model, settings)
    return model, MappedWeights(model, stored)


def _refuse_split(settings: ModelSettings) -> None:
    if settings.quantization is not None:
        raise ConfigurationError(
            "a model in 4 bits cannot be split over ranks",
            code="quantization_not_split",
            where="model.quantization, machine.trainer_sharding",
            remedy="train it in one process, or leave model.quantization out",
        )


def _frozen_and_adapted(
    model: PreTrainedModel, settings: ModelSettings, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    family = family_of(model.config)
    freeze(model, family, settings.freeze)
    if settings.quantization is not None:
        quantize(model, family, device)
    return add_adapters(model, family, settings.lora, settings.freeze) if settings.lora is not None else model


def _loaded(
    config: PreTrainedConfig, source: str | Path, settings: ModelSettings, dtype: torch.dtype
) -> PreTrainedModel:
    check_sizes(config, locate(source, settings.revision))
    with foreign("the model cannot be loaded", where=str(source)):
        model, report = AutoModelForImageTextToText.from_pretrained(
            locate(source, settings.revision),
            dtype=dtype,
            attn_implementation=_implementation(settings),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported here instead, with what to do
            **local_code_options(settings.trust_remote_code),
        )
    _check_weights(report, source)
    return model


def _empty(config: PreTrainedConfig, settings: ModelSettings) -> PreTrainedModel:
    """Buffers are real: what no checkpoint has, such as rotary frequencies, is computed as the model is made."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForImageTextToText.from_config(
            config,
            dtype=DTYPES[settings.dtype],
            attn_implementation=_implementation(settings),
            trust_remote_code=is_remote(config),
        )


def freeze(model: PreTrainedModel, family: Family, components: tuple[str, ...]) -> None:
    """Stop gradients of every parameter of the named components; the others are left as they are."""
    for name, parameter in model.named_parameters():
        if family.component_of(name) in components:
            parameter.requires_grad_(False)


def save_checkpoint(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    folder: Path,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write safetensors, configuration and processor in the Hugging Face layout, adapters merged into the weights.

    `weights` are those to write, under the names of the model without adapters, where a sharded trainer has
    gathered them itself. A reader of `folder` sees the earlier checkpoint or this one, never half of one.

    Raises:
        StoreError: it could not be written, as on a full disk.
    """
    base, state = base_model(model), dict(merged_weights(model) if weights is None else weights)
    ours = has_hub_layout(base.config) and not is_remote(base)  # code of its own has the names of its files
    with checkpoint_folder(folder) as new:
        if ours:  # what transformers itself writes would be wrong
            base.save_pretrained(new, state_dict=to_hub(state, base.config), save_original_format=False)
        else:
            base.save_pretrained(new, state_dict=state)
        processor.save_pretrained(new)
    return folder


def _implementation(settings: ModelSettings) -> str:
    """What transformers loads, before `choose_kernels`."""
    return "sdpa" if settings.attn_implementation == "auto" else settings.attn_implementation


def _check_attention(implementation: str) -> None:
    if implementation == "flash_attention_2" and not is_installed("flash-attn"):
        raise ConfigurationError(
            "flash_attention_2 needs the package flash-attn, which is not installed",
            code="flash_attention_missing",
            where="model.attn_implementation",
            remedy="install flash-attn on a machine with a GPU, or leave attn_implementation out",
        )


def check_sizes(config: PreTrainedConfig, folder: Path) -> None:
    """See, before memory is taken for it, that the model of a config.json is not larger than the weights beside it.

    Raises:
        DataError: it is, the config.json is of no model that can be built, or the weights cannot be read.
    """
    tensors = read_tensors(folder)
    stored = sum(math.prod(shape) for _, shape in tensors.values())
    remedy = "use a checkpoint whose weights belong to its config.json"
    depth = max((value for key, value in _numbers(config.to_dict()) if _DEPTH.fullmatch(key)), default=0)
    if depth > len(tensors):
        raise DataError(
            f"config.json has {depth} layers, the weights are {len(tensors)} tensors",
            code="weights_mismatch",
            where=str(folder),
            remedy=remedy,
        )
    with foreign("no model can be built", where=f"{folder}/config.json", remedy=remedy), torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=is_remote(config))
    needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > stored:
        raise DataError(
            f"config.json describes a model of {needed:,} parameters, the weights beside it are {stored:,}",
            code="weights_mismatch",
            where=str(folder),
            remedy=remedy,
        )


def _numbers(document: Any) -> Iterator[tuple[str, int]]:
    """Every integer in a configuration with its own key."""
    for key, value in document.items() if isinstance(document, dict) else ():
        if type(value) is int:
            yield str(key), value
        yield from _numbers(value)


def _check_weights(report: Mapping[str, Any], source: str | Path) -> None:
    """A checkpoint of another model loads with random weights in the gaps, or without what it has more; refuse it."""
    kinds = {"missing": "missing_keys", "not in the model": "unexpected_keys", "of another shape": "mismatched_keys"}
    found = {kind: sorted(map(str, report[keys])) for kind, keys in kinds.items()}
    if any(found.values()):
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in found.items() if names)
        raise DataError(
            f"config.json and weights disagree: {counts}, first: {next(names[0] for names in found.values() if names)}",
            code="weights_mismatch",
            where=str(source),
            remedy="use a checkpoint whose weights belong to its config.json",
        )
