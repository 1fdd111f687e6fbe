"""Attention in a sequence of packed rows, in which a beginning that several rows share is stored once.

The sequence is cut into segments. A segment attends to the segments that its rows begin with, and within itself as in a
row of its own. On a GPU in 16 bits this is FlashAttention for sequences of several lengths (PyTorch's or version 4).
Elsewhere, and if images attend in both directions, segments of equal lengths are batched for
`scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from armature.components.contracts.errors import ConfigurationError
from armature.components.models import flash
from armature.components.models.context_parallel import ContextParallel, to_device
from armature.components.models.flash import TRITON
from armature.components.models.varlen import has_kernel, under_autocast

PACKED = "packed"
"""Name under which this attention is registered in transformers. If it is called without segments, it does the same as
`sdpa`."""
REMEDY = "leave trainer.packing out: padded rows train the same"
"""Remedy of errors about packing."""
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Keyword argument that turns on grouped heads. torch versions without this argument always support grouped heads."""
_KNOWN_OPTIONS = {"position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states", "return_dict"}
"""Options that transformers passes and that do not change the result of this attention."""


class Segments:
    """The S segments of a packed sequence of T tokens, with tensors that all layers share.

    Attributes:
        lengths: number of tokens of each segment, in order.
        keys: (K,) int64: segment after segment, the tokens that it may attend to; the last ones are its own tokens.
        key_lengths: number of `keys` of each segment.
        blocks: (T,) int64: tokens of a segment with the same number attend in both directions; -1 marks causal tokens.
        None: all are causal.
        context: the ranks that share the sequence; None: this rank has all of it.
        parents: the segment that each continues, -1 for the first of a row; only layers with a state need it.
        layers: number of layers that have used these segments.
        shared: what layers with a state derive from the segments, once for all layers.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        keys: Tensor,
        key_lengths: Sequence[int],
        blocks: Tensor | None = None,
        context: ContextParallel | None = None,
        parents: Sequence[int] = (),
    ) -> None:
        self.lengths, self.keys, self.key_lengths, self.blocks = lengths, keys, key_lengths, blocks
        self.context, self.parents, self.layers = context, parents, 0
        self.shared: dict[str, Any] = {}
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the cumulative numbers of the segments' queries and of their keys, each of shape (S + 1,) int32 and
        starting at 0."""
        queries, keys = (torch.tensor([0, *accumulate(each)]) for each in (self.lengths, self.key_lengths))
        return to_device(queries.int(), self.keys.device), to_device(keys.int(), self.keys.device)

    @cached_property
    def copies(self) -> tuple[Tensor, Tensor]:
        """Return where the copies of each token are in `keys`. The first tensor, (K,) int64, lists the positions of all
        copies of token 0, then of token 1, and so on. The second, (T + 1,), has the index in that list at which each
        token's copies start."""
        tokens, order = self.keys.sort(stable=True)
        return order, torch.searchsorted(tokens, torch.arange(sum(self.lengths) + 1, device=tokens.device))

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Group segments of equal lengths. Per group: query indices (b, n) and key indices (b, m) into the packed
        sequence."""
        begins: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        query = key = 0
        for n, m in zip(self.lengths, self.key_lengths, strict=True):
            begins[n, m].append((query, key))
            query, key = query + n, key + m
        groups = []
        for (n, m), first in begins.items():
            at = torch.tensor(first, device=self.keys.device)
            queries = at[:, :1] + torch.arange(n, device=at.device)
            groups.append((queries, self.keys[at[:, 1:] + torch.arange(m, device=at.device)]))
        return groups

    @cached_property
    def order(self) -> Tensor:
        """Return the position of each token, (T,) int64, in the concatenation of the queries of all `groups`."""
        return torch.cat([queries.flatten() for queries, _ in self.groups]).argsort()

    def mask(self, group: int, window: int | None) -> Tensor | None:
        """Return the attention mask of a group, (n, m) or (b, 1, n, m); True where a query attends to a key. Return
        None if the attention is causal and needs no mask."""
        if (group, window) not in self._masks:
            queries, keys = self.groups[group]
            self._masks[group, window] = self._mask(queries, keys.shape[1], window)
        return self._masks[group, window]

    def _mask(self, queries: Tensor, m: int, window: int | None) -> Tensor | None:
        n = queries.shape[1]
        if window is not None and window >= m:
            window = None
        blocks = None if self.blocks is None else self.blocks[queries]
        if blocks is not None and not blocks.ge(0).any():
            blocks = None
        if n == m and window is None and blocks is None:
            return None
        distance = torch.arange(m - n, m, device=queries.device)[:, None] - torch.arange(m, device=queries.device)
        allowed = distance >= 0
        if blocks is not None:
            allowed = allowed.repeat(len(blocks), 1, 1)
            allowed[:, :, m - n :] |= (blocks[:, :, None] == blocks[:, None]) & (blocks >= 0)[:, :, None]
            allowed = allowed[:, None]
        return allowed if window is None else allowed & (distance < window)


@torch.compiler.disable
def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention within segments. Query, key and value are (1, H, T, D); the result is (1, T, H, D).

    Ranks that share a sequence each pass and get only their own tokens.

    Raises:
        ConfigurationError: the model uses an option that packed attention does not support.
    """
    if segments is None:
        options = more | {"scaling": scaling, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    unknown = sorted(name for name, option in more.items() if option is not None and name not in _KNOWN_OPTIONS)
    if unknown or dropout:
        raise ConfigurationError(
            f"{type(module).__name__} calls its attention with {', '.join(unknown) or 'dropout'}",
            code="packing_unsupported",
            where="trainer.packing",
            remedy=REMEDY,
        )
    segments.layers += 1
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in under_autocast(query, key, value))
    if segments.context is not None:
        q, k, v = segments.context.whole_sequence(q, k, v, sum(segments.lengths))
    if has_kernel(q) and segments.blocks is None:
        out = _flash(q, k, v, segments, scaling, sliding_window)
    else:
        out = _by_shape(q, k, v, segments, scaling, sliding_window)
    if segments.context is not None:
        out = segments.context.own_tokens(out)
    return out[None], None


def _flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None) -> Tensor:
    """Compute attention with FlashAttention kernels, which do not support blocks of tokens that attend in both
    directions."""
    if TRITON:
        q, k, v = _Gathered.apply(q, k, v, segments)
    else:
        q, k, v = q.contiguous(), k.index_select(0, segments.keys), v.index_select(0, segments.keys)
    longest = max(segments.lengths), max(segments.key_lengths)
    if flash.has_kernel(q, k):
        return flash.attend(q, k, v, segments.ends, longest, scale, window)
    side = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, *segments.ends, *longest, scale=scale, window_size=(side, 0), **_GROUPED)
    assert isinstance(out, Tensor)
    return out


class _Gathered(torch.autograd.Function):
    """Return the queries, and the keys and values in the order of `Segments.keys`, segment after segment.

    In the backward pass the gradients of a key's copies are added in fp32, in a fixed order. Results lie in memory head
    after head, as compiled layers expect.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        ctx.segments = segments
        return q.contiguous(), k.index_select(0, segments.keys), v.index_select(0, segments.keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from armature.components.models.kernels import sum_copies

        copies, n_tokens = ctx.segments.copies, len(d_q)
        return (
            sum_copies(d_q, None, n_tokens),
            sum_copies(d_k, copies, n_tokens),
            sum_copies(d_v, copies, n_tokens),
            None,
        )


def _by_shape(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, window: int | None) -> Tensor:
    """Compute attention with one `scaled_dot_product_attention` per group of segments; supports any mask."""
    repeats, outs = q.shape[1] // k.shape[1], []
    for group, (queries, keys) in enumerate(segments.groups):
        mask = segments.mask(group, window)
        query, key, value = (tensor.transpose(1, 2) for tensor in (q[queries], k[keys], v[keys]))
        grouped = repeats > 1 and mask is None
        if repeats > 1 and not grouped:  # no GPU kernel supports both a mask and grouped heads
            key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[segments.order]


AttentionInterface.register(PACKED, attend_packed)
AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
