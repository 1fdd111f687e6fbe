"""Mixtures of experts: the layout of their weights in files, and their routers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
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


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the routers of a mixture of experts, in the order of the layers. Layers without experts have none."""
    return (module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter"))
