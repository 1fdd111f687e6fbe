"""Let vLLM on a CPU serve Gated DeltaNet, the linear attention of Qwen3.5, in fp32.

vLLM (0.32) has a CPU kernel for bf16 only. In fp32 a server starts, and dies of its first request: "CPU GDN attention
requires BF16". Here each sequence is computed alone, token after token, so its results do not depend on the batch.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import conv1d, softplus

EPSILON = 1e-6


def serve_fp32() -> None:
    """Patch vLLM's operator for Gated DeltaNet on CPU to compute fp32 tensors here. Repeated calls have no further
    effect."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    except ImportError:  # an earlier vLLM, which refuses Gated DeltaNet on CPU
        return
    theirs = gdn_attention.cpu_gdn_attention_core
    if hasattr(theirs, "serves_fp32"):
        return

    def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
        if mixed_qkv.dtype != torch.float32:
            theirs(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = gdn_attention.get_forward_context()
        layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
        if context.attn_metadata is not None:  # it is None while vLLM measures its memory
            attend(layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    # vLLM makes the operator's schema of the annotations, and needs types there, not their names.
    core.__annotations__ = get_type_hints(theirs) | {"return": None}
    core.serves_fp32 = True  # type: ignore[attr-defined]
    gdn_attention.cpu_gdn_attention_core = core


def attend(layer: Any, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Compute a layer for all scheduled sequences, and update their states in its cache.

    Args:
        layer: vLLM's layer. Its cache has for each slot the last tokens before the convolution, and the state
            (HV, V, K).
        metadata: where each sequence's tokens begin, its slot, and whether it continues.
        mixed: (T, C) queries, keys and values before the convolution.
        b, a: (T, HV) inputs of the step size and of the decay.
        out: (T, HV, V) is filled with the result.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    if metadata.num_actual_tokens == 0:
        return
    sequences = metadata.num_decodes + metadata.num_prefills
    starts = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor.tolist()
    old = [True] * sequences if metadata.has_initial_state is None else metadata.has_initial_state.tolist()
    tails, states = layer.kv_cache[0], layer.kv_cache[1]
    if not is_conv_state_dim_first():
        tails = tails.transpose(1, 2)  # (slots, C, width - 1)
    weight = layer.conv1d.weight.view(len(layer.conv1d.weight), 1, -1)
    seen = weight.shape[-1] - 1
    decay = (-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias)).exp()
    step = b.sigmoid()
    for number in range(sequences):
        part, slot = slice(starts[number], starts[number + 1]), slots[number]
        if not old[number]:  # the slot has what its last sequence left
            tails[slot], states[slot] = 0.0, 0.0
        window = torch.cat([tails[slot, :, :seen], mixed[part].t()], 1)
        tails[slot, :, :seen] = window[:, -seen:]
        convolved = torch.nn.functional.silu(conv1d(window[None], weight, layer.conv1d.bias, groups=len(weight)))
        q, k, v = (heads[0] for heads in layer.rearrange_mixed_qkv(convolved[0].t().contiguous()))
        out[part], state = delta_rule(q, k, v, decay[part], step[part], states[slot].transpose(-1, -2))
        states[slot] = state.transpose(-1, -2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule (https://arxiv.org/abs/2412.06464) of one sequence, token after token:
    S = decay S; S = S + step k (v - k S); o = q S.

    Args:
        q, k: (T, H, K), normalized here.
        v: (T, HV, V).
        decay, step: (T, HV).
        state: S before the first token, (HV, K, V).

    Returns:
        Outputs (T, HV, V), and S after the last token.
    """
    repeats = v.shape[1] // q.shape[1]
    q, k = (_unit(part).repeat_interleave(repeats, 1) for part in (q, k))
    q = q * q.shape[-1] ** -0.5
    outs = []
    for token in range(len(v)):
        state = state * decay[token, :, None, None]
        error = v[token] - torch.einsum("hk,hkv->hv", k[token], state)
        state = state + torch.einsum("hk,hv->hkv", k[token], error * step[token, :, None])
        outs.append(torch.einsum("hk,hkv->hv", q[token], state))
    return torch.stack(outs), state


def _unit(x: Tensor) -> Tensor:
    """Divide heads by their length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
