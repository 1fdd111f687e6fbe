"""Distances between a teacher's and a student's distributions, over the teacher's likeliest tokens and the rest.

At one token, P is the teacher's distribution and Q the student's. Both are reduced to k + 1 outcomes: the k tokens that
the teacher finds likeliest, and all other tokens as one. Their divergence is never larger than the whole
distributions' divergence, it is 0 with gradient 0 if both are equal, and exact if k is V - 1 or V. (A sum over k tokens
alone would have a gradient at P = Q, because the mass of these tokens would depend on the student.)
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor, nn

from armature.components.vlm.heads.backends import EXCLUDED, HeadSettings
from armature.components.vlm.heads.linear import weight_and_bias
from armature.components.vlm.settings import JSD, Divergence, ForwardKL

REST = torch.finfo(torch.float32).eps
"""Smallest probability of the rest. Log-probs in fp32 do not show a smaller one."""


def likeliest_tokens(
    head: nn.Module, hidden: Tensor, forbidden: Tensor, k: int, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest next tokens (N, k) after each of N hidden states (N, D), and their log-probs (N, k).

    There are fewer than k if fewer tokens are allowed.
    """
    k = min(k, int((~forbidden).sum()))
    parts = []
    for part in hidden.split(settings.chunk_tokens):
        logits = head(part)
        logits = _shaped(logits.to(torch.promote_types(logits.dtype, torch.float32)), settings)
        parts.append(logits.masked_fill_(forbidden, EXCLUDED).log_softmax(-1).topk(k))
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def candidate_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, logprobs: Tensor, ids: Tensor, settings: HeadSettings
) -> Tensor:
    """Return the log-probs (N, k) of the tokens `ids` (N, k), which are allowed ones, with gradient.

    A backend has computed the log-probs (N,) of `targets` (N,). The normalizer of the softmax follows from them, so
    only k + 1 rows of the head are multiplied with each hidden state.
    """
    weight, bias = weight_and_bias(head)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    rows = torch.cat([targets[:, None], ids], 1)
    with torch.autocast(kind, enabled=False):
        precise = torch.promote_types(dtype, torch.float32)  # as the backends do, which sum in fp32
        chosen = torch.nn.functional.embedding(rows, weight).to(dtype).to(precise)
        logits = torch.einsum("nd,nkd->nk", hidden.to(dtype).to(precise), chosen)
        logits = _shaped(logits if bias is None else logits + bias[rows], settings)
    return logits[:, 1:] - logits[:, :1] + logprobs[:, None]


def divergence(student: Tensor, teacher: Tensor, loss: Divergence) -> Tensor:
    """Return the divergences (N,) of two distributions at N tokens, float64, with the student's gradient.

    With P the teacher's and Q the student's distribution they are KL(P || Q) (forward_kl), KL(Q || P) (reverse_kl, Gu
    et al. 2023, arXiv:2306.08543) or beta KL(P || M) + (1 - beta) KL(Q || M) with M = beta P + (1 - beta) Q (jsd,
    Agarwal et al. 2023, arXiv:2306.13649).

    Args:
        student: log-probs (N, k) of the teacher's likeliest tokens under the student.
        teacher: their log-probs (N, k) under the teacher.

    Example:
        >>> half, most = torch.tensor([[0.5]]).log(), torch.tensor([[0.9]]).log()
        >>> divergence(half, most, ForwardKL(name="forward_kl"))  # 0.9 log(0.9 / 0.5) + 0.1 log(0.1 / 0.5)
        tensor([0.3681], dtype=torch.float64)
    """
    log_q, log_p = _with_rest(student), _with_rest(teacher)
    if isinstance(loss, JSD):
        log_m = torch.logaddexp(log_p + log(loss.beta), log_q + log(1 - loss.beta))
        return loss.beta * _kl(log_p, log_m) + (1 - loss.beta) * _kl(log_q, log_m)
    return _kl(log_p, log_q) if isinstance(loss, ForwardKL) else _kl(log_q, log_p)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Return log-probs (N, k + 1) of k tokens, and of all others together."""
    logprobs = logprobs.double()
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=REST)
    return torch.cat([logprobs, rest.log()], -1)


def _shaped(logits: Tensor, settings: HeadSettings) -> Tensor:
    """Return logits after softcap and temperature."""
    if settings.softcap is not None:
        logits = torch.tanh(logits / settings.softcap) * settings.softcap
    return logits / settings.temperature
