"""Attention among the tokens of an image, given by `is_mm_prefix_lm` in the configuration of families that support both
kinds.

True or absent: each token of an image attends to all tokens of that image. False: only to earlier ones. vLLM reads the
same attribute, so trainer and server agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Molmo2Model, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.family import FAMILIES, family_of
from armature.components.models.packed_attention import PACKED
from armature.components.models.settings import ImageAttention
from armature.components.models.varlen import is_remote

LINEAR = "linear_attention"
"""Layer type with a recurrent state, such as Gated DeltaNet."""
CAUSAL_LAYERS = frozenset({"full_attention", "sliding_attention", LINEAR})
"""Layer types in which a token depends on earlier ones only."""
_TYPE_IDS = ("mm_token_type_ids", "token_type_ids")


def image_attention(config: PreTrainedConfig) -> ImageAttention | None:
    """The kind of attention among image tokens according to `config`; None if the family supports only one."""
    if not family_of(config).image_attention:
        return None
    return "bidirectional" if getattr(config, "is_mm_prefix_lm", True) else "causal"


def choose_image_attention(config: PreTrainedConfig, chosen: ImageAttention | None) -> None:
    """Write the chosen kind of image attention into a configuration before it is saved. With None, the configuration is
    not changed.

    Raises:
        ConfigurationError: the family supports only one kind.
    """
    if chosen is not None:
        _check_both_kinds(config, chosen)
        config.is_mm_prefix_lm = chosen == "bidirectional"


def check_image_attention(config: PreTrainedConfig, chosen: ImageAttention | None, attn_implementation: str) -> None:
    """Check that the trainer will attend as the server does, which reads the checkpoint's config.json.

    Raises:
        ConfigurationError: the family supports only one kind, the checkpoint has another one, or the kernels cannot do
            it.
    """
    actual = image_attention(config)
    if chosen is not None:
        _check_both_kinds(config, chosen)
        if actual != chosen:
            raise ConfigurationError(
                f"model.image_attention is {chosen}, but the checkpoint's config.json says {actual}",
                code="image_attention_mismatch",
                where="model.image_attention",
                remedy=f'put "is_mm_prefix_lm": {str(chosen == "bidirectional").lower()} into the config.json of a '
                "copy and name that folder, or leave image_attention out",
            )
    if actual == "bidirectional" and attn_implementation == "flash_attention_2":
        raise ConfigurationError(
            "flash_attention_2 cannot attend in both directions inside an image",
            code="flash_attention_causal",
            where="model.attn_implementation",
            remedy="leave attn_implementation out",
        )


def _check_both_kinds(config: PreTrainedConfig, chosen: ImageAttention) -> None:
    """Raise a ConfigurationError if the family supports only one kind of image attention."""
    family = family_of(config)
    if not family.image_attention:
        raise ConfigurationError(
            f"image attention cannot be chosen for {family.name}",
            code="image_attention_fixed",
            where=f"model.image_attention = {chosen!r}",
            remedy="leave it out; families with the choice: "
            + ", ".join(one.name for one in FAMILIES.values() if one.image_attention),
        )


def apply_image_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model's body attend as its configuration says, whatever type ids it is called with.

    transformers ignores `is_mm_prefix_lm`. Also, its Molmo2 treats the tokens of all images of a sequence as one block,
    so a later image changes the log-probs of earlier tokens. Here, as in vLLM, each image is a block of its own.
    """
    mode = image_attention(model.config)
    if mode == "causal":
        model.model.register_forward_pre_hook(_causal, with_kwargs=True)
    elif mode == "bidirectional" and isinstance(model.model, Molmo2Model):
        model.model.register_forward_pre_hook(_one_block_per_image, with_kwargs=True)
    return model


def _causal(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook for causal image attention: replace the type ids, which would mark image tokens. In training
    mode transformers requires type ids, so zeros are passed; otherwise None is passed."""
    parameters = signature(module.forward).parameters
    zeros = torch.zeros_like(kwargs["input_ids"]) if module.training and kwargs.get("input_ids") is not None else None
    return args, kwargs | {name: zeros for name in _TYPE_IDS if name in parameters}


def _one_block_per_image(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook for Molmo2: pass an attention mask in which each image is a block of its own."""
    ids, types, grids = (kwargs.get(name) for name in ("input_ids", "mm_token_type_ids", "image_grids"))
    mask = kwargs.get("attention_mask")
    if grids is None or (mask is not None and mask.ndim == 4):  # no image, or the mask is made already
        return args, kwargs
    if ids is None or types is None:
        raise ConfigurationError(
            "images are passed without input_ids or mm_token_type_ids, so their tokens would attend causally",
            code="image_types_missing",
            where=type(module).__name__,
            remedy="pass both by name, as the family's adapter does, or set is_mm_prefix_lm = false in the checkpoint",
        )
    weight = module.get_input_embeddings().weight  # only its dtype is used; FSDP may have sharded it
    blocks = create_causal_mask(
        config=module.config.get_text_config(),
        inputs_embeds=torch.empty((), dtype=weight.dtype, device=ids.device).expand(*ids.shape, 1),
        attention_mask=mask,
        past_key_values=kwargs.get("past_key_values"),
        position_ids=kwargs.get("position_ids"),
        block_sequence_ids=image_blocks(ids, types, grids, module.config),
    )
    return args, kwargs | {"attention_mask": blocks}


def needs_no_mask(model: PreTrainedModel) -> bool:
    """True if right-padded rows need no attention mask, since each token attends exactly to the earlier ones.

    Without a mask, torch can choose kernels for causal attention, and key and value heads are not repeated. False for
    code from a checkpoint and for kernels that skip padding by the mask.
    """
    text = model.config.get_text_config()
    if getattr(text, "_attn_implementation", None) not in ("sdpa", PACKED) or is_remote(model):
        return False
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        return False
    causal = set(getattr(text, "layer_types", None) or ()) <= CAUSAL_LAYERS
    return causal and image_attention(model.config) != "bidirectional"


def attention_blocks(config: PreTrainedConfig, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Blocks within which tokens attend in both directions: (B, L) int64 block numbers, -1 outside of blocks. None if
    all attention is causal.

    Args:
        inputs: the model's inputs for B rows, by name.
    """
    types = next((inputs[name] for name in _TYPE_IDS if name in inputs), None)
    if image_attention(config) != "bidirectional" or types is None or not types.any():
        return None
    if "image_grids" in inputs:
        return image_blocks(inputs["input_ids"], types, inputs["image_grids"], config)
    return get_block_sequence_ids_for_mask(types, types.device).long()


def image_blocks(ids: Tensor, types: Tensor, grids: Tensor, config: Any) -> Tensor:
    """Return the number of the image that each Molmo2 token belongs to, (B, L) int64. Images are numbered over the
    whole batch; text has -1.

    Patch tokens belong to the images in order. Among an image's other tokens, start tokens come before its patches, and
    the ends of rows and of crops after them.

    Args:
        ids: token ids (B, L).
        types: type ids (B, L), 1 on image tokens.
        grids: (images, 4): rows and columns of the low-resolution and of the high-resolution patches.
    """
    patches = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
    of_patch = torch.repeat_interleave(torch.arange(len(grids), device=ids.device), patches.to(ids.device))
    is_patch = ids == config.image_patch_id
    starts = torch.tensor(
        [config.image_start_token_id, config.low_res_image_start_token_id, config.frame_start_token_id],
        device=ids.device,
    )
    before = is_patch.flatten().cumsum(0).view_as(ids) - is_patch.long()
    nearest = before - (~is_patch & ~torch.isin(ids, starts)).long()
    return torch.where(types == 1, of_patch[nearest.clamp(0, len(of_patch) - 1)], -1)
