"""Molmo2 for vLLM, with the configuration, weight names and image processor of transformers (5.20 and newer).

vLLM's own Molmo2 (0.26 to 0.32) is written for the remote code in the published checkpoints. This module handles three
differences:

- The remote code and transformers use different names for settings and weights.
- The remote code numbers the patches of each image from 0. The processor of transformers numbers the patches of all
  images in a call consecutively.
- vLLM replaces the embedding of an image token by the features of its patch. The model adds the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature, Molmo2Processor, PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models import molmo2 as theirs
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform

_EMBEDDING = "model.embed_tokens.weight"
_HALVES = ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding")

TRANSFORMERS_NAMES = WeightsMapper(
    orig_to_new_regex={
        re.compile(r"^model\.language_model\."): "model.",
        re.compile(r"^model\.multi_modal_projector\."): "vision_backbone.",
        re.compile(r"^model\.vision_tower\.layers\."): "vision_backbone.image_vit.transformer.resblocks.",
        re.compile(r"^model\.vision_tower\."): "vision_backbone.image_vit.",
        re.compile(r"(resblocks\.\d+)\.self_attn\.([qkvo])_proj\."): r"\1.attention.w\2.",
        re.compile(r"(resblocks\.\d+)\.mlp\.fc([12])\."): r"\1.feed_forward.w\2.",
        re.compile(r"(resblocks\.\d+)\.layer_norm1\."): r"\1.attention_norm.",
        re.compile(r"(resblocks\.\d+)\.layer_norm2\."): r"\1.ffn_norm.",
    },
    orig_to_new_stacked={
        "self_attn.q_proj": ("self_attn.qkv_proj", "q"),
        "self_attn.k_proj": ("self_attn.qkv_proj", "k"),
        "self_attn.v_proj": ("self_attn.qkv_proj", "v"),
        "mlp.up_proj": ("mlp.up_gate_proj", 0),
        "mlp.gate_proj": ("mlp.up_gate_proj", 1),
    },
)


class PatchesOfEachImage(Molmo2Processor):
    """Molmo2's processor, but it numbers the patches of each image from 0, whatever other images are in the call.

    vLLM caches processed images one by one, and adds each image's offset itself when it joins several.
    """

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> Any:
        if not images and not videos and text is not None:
            # vLLM 0.26 passes text that still has image markers and inserts the images later. The processor of
            # transformers refuses markers without images, so only the tokenizer runs here.
            return BatchFeature(dict(self.tokenizer(text, **kwargs)))
        inputs = super().__call__(images=images, text=text, videos=videos, **kwargs)
        if "image_token_pooling" in inputs:
            patches, grids = inputs["image_num_crops"] * inputs["pixel_values"].shape[1], inputs["image_grids"]
            pooled = grids[:, :2].prod(1) + grids[:, 2:].prod(1)
            first = (patches.cumsum(0) - patches).repeat_interleave(pooled)[:, None]
            index = inputs["image_token_pooling"]  # (pooled patches, patches per pooled patch), padded with -1
            inputs["image_token_pooling"] = torch.where(index >= 0, index - first.to(index.dtype), index)
        return inputs


class ProcessingInfo(theirs.Molmo2ProcessingInfo):
    """Access to Molmo2's configuration and processor for vLLM: adds the published names and the image token ids."""

    def get_hf_config(self) -> PretrainedConfig:
        config = add_published_names(super().get_hf_config())
        tokenizer = self.get_tokenizer()
        for name, token in (("image_col_id", "<im_col>"), ("image_low_res_id", "<im_low>")):
            setattr(config, name, tokenizer.convert_tokens_to_ids(token))
        return config

    def get_hf_processor(self, **kwargs: object) -> PatchesOfEachImage:
        return self.ctx.get_hf_processor(PatchesOfEachImage, **kwargs)


@MULTIMODAL_REGISTRY.register_processor(
    theirs.Molmo2MultiModalProcessor, info=ProcessingInfo, dummy_inputs=theirs.Molmo2DummyInputsBuilder
)
class Molmo2(theirs.Molmo2ForConditionalGeneration):
    """Molmo2 that loads weights under the names of transformers or of the published checkpoints.

    A call may bring a whole checkpoint or single tensors.

    Raises:
        ValueError: the checkpoint needs bidirectional attention within images and this is a CPU, where vLLM's
            attention is always causal.
    """

    hf_to_vllm_mapper = theirs.Molmo2ForConditionalGeneration.hf_to_vllm_mapper | TRANSFORMERS_NAMES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.model_config.is_mm_prefix_lm and current_platform.is_cpu():
            raise ValueError(
                "vLLM's attention on CPU is causal inside images, this checkpoint's is not: serve it on a GPU, or "
                'set is_mm_prefix_lm = false in its config.json (model.image_attention = "causal") and train it so'
            )
        add_published_names(vllm_config.model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        table = self.model.embed_tokens
        shard = table.shard_indices
        table.weight.weight_loader = load_rows(shard.org_vocab_start_index, shard.org_vocab_end_index)
        self._second_half = table.num_embeddings - self.config.text_config.additional_vocab_size
        self._loaded = False

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        placed = super()._process_image_input(image_input)
        tokens = image_input["image_tokens"]
        patch = self.get_language_model().embed_input_ids(tokens.new_tensor([self.img_patch_id]))
        tokens_of_each = tokens.split(image_input["num_image_tokens"].tolist())
        return tuple(
            torch.where((ids == self.img_patch_id)[:, None], embeddings + patch, embeddings)
            for embeddings, ids in zip(placed, tokens_of_each, strict=True)
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights and return the names of the parameters that were loaded.

        The published checkpoints store the token embeddings in two tensors, `_HALVES`. Later calls may bring one of
        them alone.

        Raises:
            ValueError: the first call, which must bring a whole checkpoint, has only one of the two tensors.
        """
        halves: set[str] = set()
        loader = AutoWeightsLoader(self)
        loaded: set[str] = loader.load_weights(self._place_halves(weights, halves), mapper=self.hf_to_vllm_mapper)
        if len(halves) == 1 and not self._loaded:
            raise ValueError(f"the checkpoint has only {halves.pop()} of {' and '.join(_HALVES)}")
        self._loaded = True
        return loaded

    def _place_halves(self, weights: Iterable[tuple[str, Tensor]], seen: set[str]) -> Iterable[tuple[str, Tensor]]:
        for name, value in weights:
            if name in _HALVES:
                seen.add(name)
                value.first_row = _HALVES.index(name) * self._second_half  # type: ignore[attr-defined]
                yield _EMBEDDING, value
            else:
                yield name, value


def load_rows(start: int, end: int) -> Callable[[Tensor, Tensor], None]:
    """Return a vLLM weight loader for rows [start, end) of an embedding table, the rows that this rank holds.

    The loader copies the rows that overlap with the tensor it gets. The tensor's attribute `first_row`, 0 by default,
    says which row of the table it begins with. The loader keeps no state between calls, because the parts of a table
    may come in different calls. vLLM counts the elements that each call filled to know when the table is complete.
    """

    def load(param: Tensor, loaded_weight: Tensor) -> None:
        first = getattr(loaded_weight, "first_row", 0)
        low, high = max(start, first), min(end, first + len(loaded_weight))
        if low < high:
            param.data[low - start : high - start].copy_(loaded_weight[low - first : high - first])
        param.data[end - start :].zero_()  # padding

    return load


def add_published_names(config: PretrainedConfig) -> PretrainedConfig:
    """Add the setting names of the published checkpoints' remote code to `config`, in place, and return it."""
    if not hasattr(config, "vit_config"):
        vision, adapter, text = config.vision_config, config.adapter_config, config.text_config
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        config.vit_config = PretrainedConfig(
            **{name: getattr(vision, name) for name in (*sizes, "head_dim", "hidden_act", "layer_norm_eps")},
            image_default_input_size=list(vision.image_size),
            image_patch_size=vision.patch_size,
            image_num_pos=vision.num_position_embeddings,
        )
        adapter.vit_layers = list(adapter.vision_feature_layer)
        adapter.pooling_attention_mask = True
        text.use_qk_norm = True
        text.rope_theta = text.rope_parameters["rope_theta"]
    return config
