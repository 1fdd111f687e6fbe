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


class ExpertReplay:
    """Sends tokens to the experts that the server used (routing replay, https://arxiv.org/abs/2510.11370).

    The router still computes its logits and the weights of the given experts, with gradients. It supports routers whose
    weights are a softmax over the chosen experts, as in Qwen's models.

    Args:
        model: a model with or without experts. Its routers keep a reference to this object.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers(model)
        self._experts: Tensor | None = None
        self._counts: list[Tensor] = []
        for layer, router in self.routers.items():
            router.register_forward_hook(partial(self._replace, layer))

    def use(self, experts: Tensor | None) -> None:
        """Set the experts of the next forward pass and of layers that its backward pass computes again.

        Args:
            experts: (T, layers, k) integers for the T tokens in the order in which the model computes them, -1 where
                the router chooses. None: it chooses everywhere.
        """
        self._experts = experts

    def take_counts(self) -> Tensor:
        """Return, since the last call, how often the router chose other experts than the server for a token in a layer,
        and how often they were compared: (2,) float64."""
        counts, self._counts = self._counts, []
        return torch.stack(counts).sum(0) if counts else torch.zeros(2, dtype=torch.float64)

    @torch.compiler.disable
    def _replace(self, layer: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook of a router: return its output for the given experts."""
        if self._experts is None:
            return output
        logits, weights, chosen = output
        forced = self._experts[:, layer].long()
        experts = torch.where(forced >= 0, forced, chosen)
        compared = (forced >= 0).all(-1)
        other = compared & (experts.sort(-1).values != chosen.sort(-1).values).any(-1)
        self._counts.append(torch.stack([other.sum(), compared.sum()]).double())
        replayed = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
        replayed = replayed / replayed.sum(-1, keepdim=True)
        return logits, replayed.to(weights.dtype), experts
