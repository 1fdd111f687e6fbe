"""Sizes of a model, and what one rank of a trainer and one server hold of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from armature.components.contracts.foreign import foreign
from armature.components.models.families import family_of
from armature.components.models.settings import ModelSettings
from armature.components.models.source import local_code_options
from armature.components.project import project_source
from armature.components.training.sharding import blocks, n_parameters
from armature.components.vlm.memory import MemoryEstimate, estimate_memory_of
from armature.components.vlm.settings import TrainerSettings

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelGeometry:
    """`shapes`: of every parameter; `trained`: the share of the parameters that the optimizer has states of;
    `largest`, `root`: parameters of the largest block that is gathered at once, and of all that is in no block;
    `key_value_width`: numbers that a server keeps for a token, over all layers.
    """

    shapes: tuple[Shape, ...]
    trained: float
    blocks: int
    largest: int
    root: int
    key_value_width: int
    lora: bool
    estimate: MemoryEstimate

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes))

    def shard(self, ranks: int) -> int:
        """Parameters of the first of `ranks`: FSDP2 splits the first dimension, so a rank has whole rows of it."""
        return sum(shard_size(shape, ranks) for shape in self.shapes)


def shard_size(shape: Shape, ranks: int) -> int:
    """Numbers of a tensor on the first of `ranks`."""
    return ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1


def read_config(settings: ModelSettings) -> Any:
    """The configuration of the model: of a folder or a hub name, without its weights, or of a tiny model.

    Raises:
        DataError: there is none here, and the hub does not answer.
    """
    if settings.tiny is not None and settings.tiny_family is not None:
        from armature.components.models.tiny.tokenizer import train_tokenizer
        from armature.components.models.tiny_families import TINY_FAMILIES

        recipe, tiny = TINY_FAMILIES[settings.tiny_family], settings.tiny
        tokenizer = train_tokenizer(
            recipe.vocabulary, tiny.vocabulary_size, tiny.corpus, recipe.template, tiny.max_positions
        )
        return recipe.config(tiny, tokenizer)
    source = project_source(settings.source)
    remedy = "give a folder that has the model's config.json, which is all that is read: --set model.source=/a/folder"
    with foreign("the model's configuration cannot be read", where=source, remedy=remedy):
        return AutoConfig.from_pretrained(
            Path(source) if Path(source).is_dir() else source,
            revision=settings.revision,
            **local_code_options(settings.trust_remote_code),
        )


def geometry(config: Any, model: ModelSettings, trainer: TrainerSettings, server_dtype: str) -> ModelGeometry:
    """Counted on the meta device: no weights are read. A block is a layer, of a vision tower too, as the costs of
    `Assumptions` were measured.
    """
    family = family_of(config)
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(config, trust_remote_code=model.trust_remote_code)
    layers = replace(family, whole_tower=False)
    units = [module for module, _ in blocks(skeleton, layers, None)][:-1]
    sizes = [n_parameters(unit) for unit in units]
    estimate = estimate_memory_of(skeleton, model, trainer, server_dtype)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelGeometry(
        shapes=tuple(tuple(parameter.shape) for parameter in skeleton.parameters()),
        trained=estimate.trainable / estimate.parameters,
        blocks=len(units),
        largest=max(sizes, default=0),
        root=estimate.parameters - sum(sizes),
        key_value_width=2 * heads * width * text.num_hidden_layers,
        lora=model.lora is not None,
        estimate=estimate,
    )


def trainer_bytes(sizes: ModelGeometry, trainer: TrainerSettings, ranks: int, sharing: int = 1) -> int:
    """Bytes of a rank: shards in fp32 with gradients and AdamW's moments, what is gathered, and a micro-batch.

    Of the activations it has its part where `sharing` ranks compute a sequence together. A single rank holds all of it
    as `armature check` says.
    """
    estimate = sizes.estimate
    reference = 4 * (trainer.kl_coefficient > 0 and not sizes.lora)
    if ranks == 1:
        return estimate.trainer + reference * sizes.parameters
    width = 2 if trainer.autocast == "bf16" or trainer.weights == "bfloat16" else 4
    states = 4 if trainer.optimizer_states == "cpu" else 12
    shards = sizes.shard(ranks) * (4 + states * sizes.trained + reference)
    gathered = (sizes.root + 2 * sizes.largest) * width + max(sizes.root, sizes.largest) * sizes.trained * (4 + width)
    return int(shards + gathered) + ceil(estimate.activations / sharing) + estimate.logits


def server_bytes(sizes: ModelGeometry, gpus: int, sequences: int, context: int) -> int:
    """Bytes of one of the GPUs of a server: its part of the weights and of `sequences` of `context` tokens."""
    return int((sizes.estimate.server_weights + sequences * context * key_value_bytes(sizes)) / gpus)


def key_value_bytes(sizes: ModelGeometry) -> int:
    """Of a token, in 16 bits."""
    return 2 * sizes.key_value_width
