"""A stand-in for the package flash-attn on a machine without it: the same FlashAttention-2 kernels, those that
PyTorch carries (aten::_flash_attention_forward), under flash-attn's names. No dropout, no window.
"""

from pkgutil import extend_path

import torch

__path__ = extend_path(__path__, __name__)  # flash-attn-4 lies in this package too
__version__ = "2.8.3"


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
        out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, rng, unused)
        ctx.rest = (max_q, max_k, causal, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, cu_q, cu_k, rng, unused = ctx.saved_tensors
        max_q, max_k, causal, scale = ctx.rest
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, rng, unused, scale=scale
        )
        return dq, dk, dv, None, None, None, None, None, None


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    return _Varlen.apply(
        q,
        k,
        v,
        cu_seqlens_q.int(),
        cu_seqlens_k.int(),
        int(max_seqlen_q),
        int(max_seqlen_k),
        bool(causal),
        softmax_scale,
    )


_lengths = {}


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    b, n, m = q.shape[0], q.shape[1], k.shape[1]
    keys = [(b, n, q.device), (b, m, q.device)]
    for key in keys:
        if key not in _lengths:
            _lengths[key] = torch.arange(0, (b + 1) * key[1], key[1], dtype=torch.int32, device=q.device)
    flat = [t.reshape(-1, t.shape[-2], t.shape[-1]) for t in (q, k, v)]
    return _Varlen.apply(*flat, _lengths[keys[0]], _lengths[keys[1]], n, m, bool(causal), softmax_scale).view(q.shape)


def flash_attn_with_kvcache(*arguments, **more):
    raise NotImplementedError("this stand-in has no cache of keys and values: it trains, and generates nothing")
