"""The kernels of vLLM's server in the trainer, with gradients, and a Qwen2.5-VL of transformers that may run them.

`use` says which of `ALL` it runs from then on. Without a GPU, PyTorch's stand in for vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

CUDA = torch.cuda.is_available()
TEXT = ("matmul", "attention", "norm", "rotary", "silu", "head")
VISION = ("v_matmul", "v_attention", "v_norm", "v_rotary", "v_silu")
ALL = frozenset(TEXT + VISION)
NAME, VISION_NAME = "bitwise", "flash_bitwise"
"""Names of the attention of the language model and of the vision tower in transformers. The second one contains "flash"
because transformers passes sequence lengths only to such names."""


@dataclass(frozen=True)
class Kernels:
    """Set of kernels, all without gradients. Inputs and outputs are rows (N, D) unless an attribute says otherwise."""

    matmul: Callable[[Tensor, Tensor], Tensor]
    """Product of an (M, K) and a (K, N) matrix."""
    norm: Callable[[Tensor, Tensor, float], Tensor]
    fused_norm: Callable[[Tensor, Tensor, float], Tensor]
    """Norm kernel that vLLM fuses with a preceding addition. Here it is called with a sum that has been computed
    already."""
    silu: Callable[[Tensor], Tensor]
    """Product silu(gate) * up. The input has gates and ups concatenated along the last dim."""
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    """Rotation of queries and keys. Arguments: q and k (T, H D), cos and sin (T, D / 2), and D."""
    attention: Callable[..., tuple[Tensor, Tensor]]
    """Attention. Arguments: q, k and v (T, H, D), ends (N + 1,) of N sequences, length of the longest one, scale, and
    causal. Returns the output (T, H, D) and a tensor that the backward pass needs."""
    logprobs: Callable[[Tensor, Tensor], Tensor]
    """Log-probs (N,) of the tokens with ids (N,), given logits (N, V)."""
    vision_rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Rotation in the vision tower. Arguments: queries or keys (T, H, D), and cos and sin (T, D / 2)."""


def vllm_kernels() -> Kernels:
    """Return vLLM's kernels. The environment must contain VLLM_BATCH_INVARIANT=1, which determines how the fused norm
    is launched."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.batch_invariant import matmul_persistent, rms_norm_batch_invariant
    from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb

    current_platform.import_kernels()

    def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, nothing = x.clone(), torch.zeros_like(x)
        ops.fused_add_rms_norm(out, nothing, weight, eps)
        return out

    def silu_and_mul(x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out, x.contiguous())
        return out

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, size: int) -> tuple[Tensor, Tensor]:
        halves = [size // 2 - 2 * (size // 6), size // 6, size // 6]  # any: cos and sin are already chosen
        three = [part[None].expand(3, -1, -1).contiguous() for part in (cos, sin)]
        return triton_mrope(q.clone(), k.clone(), *three, halves, size, size, False)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(
            q, k, v, longest, ends, longest, cu_seqlens_k=ends, softmax_scale=scale, causal=causal, num_splits=1,
            fa_version=3, window_size=[-1, -1], return_softmax_lse=True,
        )  # fmt: skip

    return Kernels(
        matmul=matmul_persistent,
        norm=rms_norm_batch_invariant,
        fused_norm=fused_norm,
        silu=silu_and_mul,
        rotary=rotary,
        attention=attention,
        logprobs=lambda logits, ids: compute_token_logprobs(logits, ids[:, None])[:, 0],
        vision_rotary=lambda x, cos, sin: apply_rotary_emb(x[None], cos, sin, False)[0],
    )


def plain_kernels() -> Kernels:
    """Return the same operations, written in plain PyTorch."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        groups, spans = q.shape[1] // k.shape[1], list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        outs = []
        for begin, end in spans:
            rows = [x[begin:end].transpose(0, 1) for x in (q, *(x.repeat_interleave(groups, 1) for x in (k, v)))]
            outs.append(scaled_dot_product_attention(*rows, scale=scale, is_causal=causal).transpose(0, 1))
        return torch.cat(outs), q.new_empty(0)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.float().chunk(2, -1)
        cos, sin = cos.float()[:, None], sin.float()[:, None]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, size: int) -> tuple[Tensor, Tensor]:
        q, k = (rotated(x.view(len(x), -1, size), cos, sin).view_as(x) for x in (q, k))
        return q, k

    return Kernels(
        matmul=torch.mm,
        norm=norm,
        fused_norm=norm,
        silu=lambda x: silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
        rotary=rotary,
        attention=attention,
        logprobs=lambda logits, ids: logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0],
        vision_rotary=rotated,
    )


@cache
def kernels() -> Kernels:
    return vllm_kernels() if CUDA else plain_kernels()


# With gradients, computed by PyTorch.


class Matmul(torch.autograd.Function):
    """Product x W^T with a gradient. A bias is added after the product has been rounded, as in the server."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        out = kernels().matmul(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        wanted = ctx.needs_input_grad
        return (
            grad @ weight if wanted[0] else None,
            rows.t() @ x.reshape(len(rows), -1) if wanted[1] else None,
            rows.sum(0) if ctx.biased else None,
        )


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernels().norm(x.reshape(-1, x.shape[-1]), weight, eps).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)
        normed, scaled = wide * inverse, grad * weight.float()
        back = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return back.to(x.dtype), (grad * normed).flatten(0, -2).sum(0).to(weight.dtype), None


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernels().silu(torch.cat([gate, up], -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        wide, grad = gate.float(), grad.float()
        sigmoid = wide.sigmoid()
        back = grad * up.float() * sigmoid * (1 + wide * (1 - sigmoid))
        return back.to(gate.dtype), (grad * wide * sigmoid).to(up.dtype)


class Rotary(torch.autograd.Function):
    """Rotation of queries and keys (T, H, D) by angles (T, D / 2). The backward pass rotates gradients in the opposite
    direction."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return (*_turned(q, k, cos, -sin), None, None)


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    flat = [x.reshape(len(x), -1).contiguous() for x in (q, k)]
    one, two = kernels().rotary(flat[0], flat[1], cos, sin, q.shape[-1])
    return one.view_as(q), two.view_as(k)


class Attention(torch.autograd.Function):
    """Attention (T, H, D) that uses the server's FlashAttention 3 in the forward pass and PyTorch's FlashAttention 2 in
    the backward pass.

    FlashAttention 2 sums gradients in a fixed order only if `torch.use_deterministic_algorithms` raises errors, not if
    it only warns.

    The latter adds up in one order only where `torch.use_deterministic_algorithms` is more than a warning.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float, causal: bool
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = kernels().attention(q, k, v, ends, longest, scale, causal)
        ctx.save_for_backward(q, k, v, ends, out, lse)
        ctx.longest, ctx.scale, ctx.causal = longest, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, ends, out, lse = ctx.saved_tensors
        if not q.is_cuda:
            with torch.enable_grad():
                arguments = [x.detach().requires_grad_() for x in (q, k, v)]
                again, _ = plain_kernels().attention(*arguments, ends, ctx.longest, ctx.scale, ctx.causal)
                return (*torch.autograd.grad(again, arguments, grad), *[None] * 4)
        groups, heads = q.shape[1] // k.shape[1], k.shape[1]
        wide = [x.repeat_interleave(groups, 1) for x in (k, v)]
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, *wide, out, lse, ends, ends, ctx.longest, ctx.longest, 0.0, ctx.causal, state,
            unused, scale=ctx.scale, window_size_left=-1, window_size_right=0 if ctx.causal else -1,
        )  # fmt: skip
        dk, dv = (x.view(len(x), heads, groups, -1).float().sum(2).to(k.dtype) for x in (dk, dv))
        return dq, dk, dv, *[None] * 4


class LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(logits, ids)
        return kernels().logprobs(logits, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, ids = ctx.saved_tensors
        back = logits.float().softmax(-1).neg_()
        back[torch.arange(len(ids), device=ids.device), ids] += 1  # a place once: the order does not matter
        return (back * grad[:, None]).to(logits.dtype), None


# The trainer, with switches.


_ON: set[str] = set()


def use(names: Collection[str]) -> None:
    """Choose the server's kernels that the trainer runs, by name: a subset of `ALL`."""
    _ON.clear()
    _ON.update(names)


def switchable(model: Any) -> Any:
    """Prepare a model that was made with `sdpa`, so that `use` can choose its kernels."""
    body = model.model
    body.language_model.config._attn_implementation, body.visual.config._attn_implementation = NAME, VISION_NAME
    for layer in body.language_model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.forward = MethodType(partial(_linear, "matmul"), module)
            elif isinstance(module, qwen.Qwen2_5_VLRMSNorm):
                module.forward = MethodType(partial(_norm, "norm"), module)
            elif isinstance(module, qwen.Qwen2MLP):
                module.forward = MethodType(partial(_mlp, "silu"), module)
    body.language_model.norm.forward = MethodType(partial(_norm, "norm"), body.language_model.norm)
    for module in body.visual.modules():
        if isinstance(module, nn.Linear):
            module.forward = MethodType(partial(_linear, "v_matmul"), module)
        elif isinstance(module, nn.Conv3d):
            module.forward = MethodType(_patches, module)
        elif isinstance(module, qwen.Qwen2_5_VLRMSNorm):
            module.forward = MethodType(partial(_norm, "v_norm"), module)
        elif isinstance(module, qwen.Qwen2_5_VLMLP):
            module.forward = MethodType(partial(_mlp, "v_silu"), module)
    for module, key in ((body.language_model.rotary_emb, "rotary"), (body.visual.rotary_pos_emb, "v_rotary")):
        module.forward = MethodType(partial(_angles, key, type(module).forward), module)
    return model


def _linear(key: str, module: nn.Linear, x: Tensor) -> Tensor:
    if key in _ON:
        return Matmul.apply(x, module.weight, module.bias)
    return linear(x, module.weight, module.bias)


def _patches(module: nn.Conv3d, x: Tensor) -> Tensor:
    if "v_matmul" not in _ON:
        return module._conv_forward(x, module.weight, module.bias)
    flat, weight = x.reshape(len(x), -1), module.weight.reshape(len(module.weight), -1)
    return Matmul.apply(flat, weight, None)


def _norm(key: str, module: Any, x: Tensor) -> Tensor:
    if key not in _ON:
        return type(module).forward(module, x)
    return Norm.apply(x, module.weight, module.variance_epsilon)


def _mlp(key: str, module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(Silu.apply(gate, up) if key in _ON else module.act_fn(gate) * up)


def _angles(key: str, original: Callable[..., Any], module: Any, x: Tensor, position_ids: Tensor) -> Any:
    """Compute the rotary frequencies on the GPU as the server does. transformers computes them on the CPU."""
    if key not in _ON:
        return original(module, x, position_ids)
    size = 2 * len(module.inv_freq)
    with torch.device(x.device):
        arguments = 1.0 / (module.config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    before, module.inv_freq = module.inv_freq, arguments
    try:
        return original(module, x, position_ids)
    finally:
        module.inv_freq = before


def _rotary(original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any) -> Any:
    """Rotate queries and keys (1, H, T, D) by cos and sin (1, T, D)."""
    if "rotary" not in _ON:
        return original(q, k, cos, sin, *more)
    half = [x[0, :, : x.shape[-1] // 2].contiguous() for x in (cos, sin)]
    q, k = Rotary.apply(q[0].transpose(0, 1), k[0].transpose(0, 1), *half)
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None]


def _vision_rotary(original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Rotate queries and keys (T, H, D) by cos and sin (T, D), which are first rounded to the dtype of q as in the
    server."""
    if "v_rotary" not in _ON:
        return original(q, k, cos, sin)
    half = [x[:, : x.shape[-1] // 2].to(q.dtype).contiguous() for x in (cos, sin)]
    return tuple(kernels().vision_rotary(x.contiguous(), *half) for x in (q, k))


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    if "attention" not in _ON:
        return sdpa_attention_forward(module, q, k, v, None, scaling=scaling)
    count = q.shape[2]
    ends = torch.tensor([0, count], dtype=torch.int32, device=q.device)
    return Attention.apply(*(x[0].transpose(0, 1) for x in (q, k, v)), ends, count, scaling, True)[None], None


def _vision_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, *, cu_seq_lens_q: Tensor, max_length_q: Any,
    scaling: float, **more: Any,
) -> Any:  # fmt: skip
    ends, longest = cu_seq_lens_q.int(), int(max_length_q)
    if "v_attention" not in _ON:
        from armature.components.models.varlen import attend_in_windows

        lengths = {"cu_seq_lens_q": ends, "max_length_q": longest}
        return attend_in_windows(module, q, k, v, attention_mask, **lengths, scaling=scaling)
    return Attention.apply(*(x[0].transpose(0, 1) for x in (q, k, v)), ends, longest, scaling, False)[None], None


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(VISION_NAME, _vision_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def rotations() -> Iterator[None]:
    """Let `use` also choose the rotations during the block. They are functions of a transformers module, so they are
    patched."""
    text, vision = qwen.apply_rotary_pos_emb, qwen.apply_rotary_pos_emb_vision
    with (
        patch.object(qwen, "apply_rotary_pos_emb", partial(_rotary, text)),
        patch.object(qwen, "apply_rotary_pos_emb_vision", partial(_vision_rotary, vision)),
    ):
        yield


def logprobs(model: Any, ids: Sequence[int], places: Sequence[int], image: dict[str, Tensor] | None = None) -> Tensor:
    """Return the log-probs (N,) of the N tokens at `places` of one row of token ids."""
    row = torch.tensor([ids], device=model.device)
    inputs = {"input_ids": row, "mm_token_type_ids": (row == model.config.image_token_id).int(), **(image or {})}
    at = torch.tensor(places, device=model.device)
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[0][at - 1]
    targets = row[0, at]
    if "head" in _ON:
        return LogProbs.apply(Matmul.apply(hidden, model.lm_head.weight, None), targets)
    return model.lm_head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
