"""Attention in vision towers, where images or windows of several lengths are packed, in one call for all of them.

On a GPU in 16 bits this is PyTorch's FlashAttention for sequences of several lengths. Elsewhere, windows of equal
length are batched for `scaled_dot_product_attention`. The module also adapts code from checkpoints to what native
classes provide.
"""

from __future__ import annotations

from collections import defaultdict
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModel, PreTrainedModel, ProcessorMixin

from armature.components.families.family import Family, image_token_ids

# --- Models with code from their checkpoint ---

MODULES = "transformers_modules"  # the package that transformers imports such code into


def is_remote(thing: object) -> bool:
    """Check that the code of the class of `thing` comes from a checkpoint."""
    return type(thing).__module__.partition(".")[0] == MODULES


def register_body(model: PreTrainedModel) -> None:
    """Register the body's class from a checkpoint, so that `AutoModel.from_config` works as for native models."""
    if is_remote(model) and is_remote(model.config):
        AutoModel.register(type(model.config), type(model.model), exist_ok=True)


def complete_processor(processor: ProcessorMixin, family: Family) -> None:
    """Add attributes to a Molmo2 processor that comes from a checkpoint. Native processors have these attributes, and
    servers and adapters use them.

    `image_token` and `image_token_id` are the token that stands for one image; `_get_num_multimodal_tokens` counts
    tokens by image size.
    """
    if family.name != "molmo2":
        return
    kind: Any = type(processor)
    token = getattr(processor, "image_placeholder_token", "<|image|>")
    if not hasattr(processor, "image_token"):
        kind.image_token = property(lambda self: token)
    if not hasattr(processor, "image_token_id"):
        kind.image_token_id = property(lambda self: self.tokenizer.convert_tokens_to_ids(self.image_token))
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        image_ids = image_token_ids(family, processor.tokenizer)

        def count(self: Any, image_sizes: Any = None, **kwargs: Any) -> dict[str, list[int]]:
            return count_image_tokens(self, image_ids, image_sizes or [], **kwargs)

        kind._get_num_multimodal_tokens = count


def count_image_tokens(processor: Any, image_ids: tuple[int, ...], sizes: Any, **kwargs: Any) -> dict[str, list[int]]:
    """Count tokens (`num_image_tokens`) and crops (`num_image_patches`) of images of (height, width) `sizes` by
    processing blank images."""
    counts: dict[str, list[int]] = {"num_image_tokens": [], "num_image_patches": []}
    for height, width in sizes:
        blank = Image.new("RGB", (width, height))
        outputs = processor(images=[blank], text=[processor.image_token], return_tensors="pt", **kwargs)
        marked = torch.isin(outputs["input_ids"], torch.tensor(image_ids))
        counts["num_image_tokens"].append(int(marked.sum()))
        counts["num_image_patches"].append(int(outputs["pixel_values"].shape[0]))
    return counts


# --- Attention of vision towers ---

WINDOWS = "flash_windows"
"""Name under which this attention is registered in transformers. The name contains "flash" because transformers passes
sequence lengths only to such names; for other names it calls attention once per image or window."""


def choose_kernels(model: PreTrainedModel) -> None:
    """Let the vision tower of a native model that was loaded with `sdpa` use the attention of this module."""
    if is_remote(model):
        return
    vision = getattr(model.config, "vision_config", None)
    if vision is not None and _takes_lengths(model):
        vision._attn_implementation = WINDOWS


def attend_in_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention in both directions within each image or window. Query, key and value are (1, H, T, D); the
    result is (1, T, H, D)."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in under_autocast(query, key, value))
    if has_kernel(q):
        out = _flash(q, k, v, cu_seq_lens_q, max_length_q, scaling)
    else:
        out = _by_length(q, k, v, cu_seq_lens_q, scaling)
    return out[None], None


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to autocast's dtype if autocast is on. Autocast does this for `scaled_dot_product_attention`, but
    not for these kernels."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    return tensors


def attention_compiles(tower: nn.Module) -> bool:
    """True if this vision tower's attention can be part of a compiled layer, since no lengths have to be read on the
    host."""
    if not _takes_lengths(tower):
        return True
    weight = next(tower.parameters())
    fits = has_kernel(torch.empty(0, 8, dtype=weight.dtype, device=weight.device))
    return fits and getattr(tower.config, "_attn_implementation", None) == WINDOWS


def _takes_lengths(model: nn.Module) -> bool:
    """True if some module of `model` takes cumulative sequence lengths."""
    kinds = {type(module) for module in model.modules()}
    return any("cu_seqlens" in signature(kind.forward).parameters for kind in kinds)


def has_kernel(q: Tensor) -> bool:
    """Check that PyTorch has a FlashAttention kernel for the device, dtype and head size of `q`."""
    if not q.is_cuda:
        return False
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    """Compute the attention by a direct call of PyTorch's kernel. The Python operators of `torch.nn.attention.varlen`
    take more host time than a short layer takes on the GPU."""
    ends, tensors = ends.int(), (q.contiguous(), k.contiguous(), v.contiguous())
    out: Tensor
    out, *_ = torch.ops.aten._flash_attention_forward(
        *tensors, ends, ends, longest, longest, 0.0, is_causal=False, return_debug_mask=False, scale=scale
    )
    return out


@torch.compiler.disable
def _by_length(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Compute the same attention as `_flash` without its kernel. All windows of the same length are one batch."""
    lengths: list[int] = ends.diff().tolist()
    begins: dict[int, list[int]] = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        begins[length].append(end - length)
    outs, places = [], []
    for length, first in begins.items():
        at = (torch.tensor(first)[:, None] + torch.arange(length)).to(q.device)
        query, key, value = (tensor[at].transpose(1, 2) for tensor in (q, k, v))
        out = scaled_dot_product_attention(query, key, value, scale=scale)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        places.append(at.flatten())
    return torch.cat(outs)[torch.cat(places).argsort()]


AttentionInterface.register(WINDOWS, attend_in_windows)
