"""A stand-in for the package flash-attn on a machine without it: the same FlashAttention-2 kernels, those that
PyTorch carries (aten::_flash_attention_forward), under flash-attn's names. No dropout, no window.
"""

import inspect
import os

import torch

MODE = os.environ.get("FLASH_SHIM", "aten")  # aten, expand (heads of keys repeated), varlen (torch.nn.attention.varlen)
__version__ = "2.8.3"
CALLS = {"dense": 0, "varlen": 0}


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


def _run(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
    if MODE != "aten":
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if MODE == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        more = {"scale": scale} if "scale" in known else {}
        more |= {"window_size": (-1, 0) if causal else (-1, -1)} if "window_size" in known else {"is_causal": causal}
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **more)
    return _Varlen.apply(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale)


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
    CALLS["varlen"] += 1
    return _run(
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
    CALLS["dense"] += 1
    b, n, m = q.shape[0], q.shape[1], k.shape[1]
    keys = [(b, n, q.device), (b, m, q.device)]
    for key in keys:
        if key not in _lengths:
            _lengths[key] = torch.arange(0, (b + 1) * key[1], key[1], dtype=torch.int32, device=q.device)
    flat = [t.reshape(-1, t.shape[-2], t.shape[-1]) for t in (q, k, v)]
    return _run(*flat, _lengths[keys[0]], _lengths[keys[1]], n, m, bool(causal), softmax_scale).view(q.shape)


def flash_attn_with_kvcache(*arguments, **more):
    raise NotImplementedError
