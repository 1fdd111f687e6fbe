"""Mixtures of experts: the layout of their weights in files, their routers, and the replay of a server's experts."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

# Files of Qwen3-VL-MoE, released or ours, hold experts as (expert, in, out), which vLLM reads; the model has
# (expert, out, in). transformers (5.23) transposes only if the shape differs from the model's. So it would write
# (expert, out, in), and would load a file whose two widths are equal without transposing.
register_checkpoint_conversion_mapping(
    "qwen3_vl_moe",
    [
        WeightConverter(f"mlp.experts.{name}", f"mlp.experts.{name}", operations=[Transpose(1, 2)])
        for name in ("gate_up_proj", "down_proj")
    ],
    overwrite=True,
)


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the routers of a mixture of experts by the number of their layer. Layers without experts have none."""
    return {
        int(re.findall(r"layers\.(\d+)\.", name)[-1]): module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter")
    }


def scores_of(router: Any, logits: Tensor) -> Tensor:
    """Return the scores (T, E) that a router gives to its E experts, in fp32 or more: softmax in Qwen's models, sigmoid
    in GLM's. GLM's correction bias and groups of experts are for the choice alone."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)


def weights_of(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the weights (T, k) with which a router adds the outputs of k experts of each token, as transformers
    computes them for the router's own choice."""
    weights = scores_of(router, logits).gather(-1, experts)
    if not hasattr(router, "e_score_correction_bias"):
        return weights / weights.sum(-1, keepdim=True)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


class RouterHooks:
    """Reads what routers compute, and sends tokens to the experts that a server used (routing replay,
    https://arxiv.org/abs/2510.11370).

    In a replay, a router still computes its logits and the weights of the given experts, with gradients.

    Args:
        model: a model with or without experts. Its routers keep a reference to this object.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers(model)
        self.collects = False
        """True: keep the logits of the next forward passes for `balance_loss`."""
        self._experts: Tensor | None = None
        self._mask: Tensor | None = None
        self._logits: list[tuple[Any, Tensor, Tensor]] | None = None
        self._compared: list[Tensor] = []
        self._used: dict[int, Tensor] = {}
        for layer, router in self.routers.items():
            router.register_forward_hook(partial(self._replace, layer))

    def use(self, experts: Tensor | None, mask: Tensor | None = None) -> None:
        """Set the experts of the next forward pass and of layers that its backward pass computes again.

        Args:
            experts: (T, layers, k) integers for the T tokens in the order in which the model computes them, -1 where
                the router chooses. None: it chooses everywhere.
            mask: (T,), 0 for padding. None: there is no padding.
        """
        self._experts, self._mask = experts, mask
        self._logits = [] if self.collects else None

    def balance_loss(self) -> Tensor:
        """Return the load-balance loss of the last forward pass, a scalar: the mean over layers of E times the sum over
        E experts of the share of tokens that choose the expert times its mean probability
        (https://arxiv.org/abs/2101.03961, equations 4 to 6). It is about k, for k experts of a token, if the load is
        even. transformers takes the tokens of all layers together, so that two uneven layers can even out."""
        assert self._logits
        collected, self._logits = self._logits, None  # the backward pass may compute layers again
        losses = []
        for router, logits, chosen in collected:
            scores = scores_of(router, logits)
            probabilities = scores / scores.sum(-1, keepdim=True)
            mask = torch.ones_like(scores[:, :1]) if self._mask is None else self._mask[:, None].to(scores.dtype)
            used = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
            shares, means = ((values * mask).sum(0) / mask.sum() for values in (used, probabilities))
            losses.append(router.num_experts * (shares * means).sum())
        return torch.stack(losses).mean()

    def take_counts(self) -> dict[str, float]:
        """Return counts since the last call, by name; empty for a model without experts.

        `experts_other`: how often a router would have chosen other experts than the server, for a token in a layer;
        `experts_compared`: how often this was compared; `experts/busiest`: in the layer where it is largest, the share
        of tokens that use the busiest expert; `experts/unused_fraction`: the share of experts that no token used.
        """
        compared, self._compared = self._compared, []
        used, self._used = self._used, {}
        counts: dict[str, float] = {}
        if used:
            totals = torch.stack(list(used.values())).cpu()
            router: Any = next(iter(self.routers.values()))
            tokens = totals.sum(1, keepdim=True) / router.top_k
            counts["experts/busiest"] = float((totals / tokens.clamp(min=1)).max())
            counts["experts/unused_fraction"] = float((totals == 0).double().mean())
        if compared:
            other, of = torch.stack(compared).sum(0).tolist()
            counts |= {"experts_other": other, "experts_compared": of}
        return counts

    @torch.compiler.disable
    def _replace(self, layer: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook of a router: return its output for the given experts."""
        logits, weights, chosen = output
        if self._logits is not None:
            self._logits.append((router, logits, chosen))
        if self._experts is None:
            self._count(layer, chosen, logits.shape[-1])
            return output
        forced = self._experts[:, layer].long()
        experts = torch.where(forced >= 0, forced, chosen)
        compared = (forced >= 0).all(-1)
        other = compared & (experts.sort(-1).values != chosen.sort(-1).values).any(-1)
        self._compared.append(torch.stack([other.sum(), compared.sum()]).double())
        self._count(layer, experts, logits.shape[-1])
        return logits, weights_of(router, logits, experts).to(weights.dtype), experts

    @torch.no_grad()
    def _count(self, layer: int, experts: Tensor, n_experts: int) -> None:
        """Count for each expert of a layer the tokens that use it, without waiting for a GPU."""
        ones = torch.ones_like(experts, dtype=torch.float64)
        if self._mask is not None:
            ones = ones * self._mask[:, None]
        counts = torch.zeros(n_experts, dtype=torch.float64, device=experts.device)
        counts.scatter_add_(0, experts.flatten(), ones.flatten())
        self._used[layer] = self._used[layer] + counts if layer in self._used else counts
