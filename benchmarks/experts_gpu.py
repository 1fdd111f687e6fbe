"""Experts of Qwen3-VL-30B-A3B: this project's grouped products, transformers' own, and its loop over experts.

Usage: python -m benchmarks.experts_gpu [small]. Layers have the released widths: hidden size 2,048, 128 experts of 768,
of which each token uses 8. Each way makes forward and backward passes in bf16 over the same random tokens, with
gradients of tokens and experts; routers are frozen. A second table has tokens with much in common, so that some experts
get many of them. MFU is the share of the GPU's peak for the products alone, forward and backward; the bound is the time
in which the GPU could compute them, or move weights and their gradients. `small` runs on a CPU. Results go to
$OUT/experts.json as well.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

from armature.components.models.grouped import GROUPED
from benchmarks.attention_gpu import CUDA, DEVICE, ROUNDS, timed
from benchmarks.step_case import PEAK_FLOPS, clean, need_gpu, peak_gib

LAYERS, TOKENS = 4, 16_384
WIDTHS = {"hidden_size": 2048, "num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
SMALL = {"hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 2}
BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory, from its data sheet."""
WAYS = {"ours": GROUPED, "transformers": "grouped_mm", "loop": "eager"}
LOADS = {"even": 0.0, "uneven": 1.0}
"""The part that all tokens have in common, relative to what is their own."""


class Experts(nn.Module):
    """Layers of experts, each with a router, a norm and a residual sum. All random."""

    def __init__(self, layers: int, widths: dict[str, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.config = Qwen3VLMoeTextConfig(**widths)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.blocks = nn.ModuleList(Qwen3VLMoeTextSparseMoeBlock(self.config) for _ in range(layers))
        for name, parameter in self.blocks.named_parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            parameter.requires_grad_("gate.weight" not in name)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(nn.functional.rms_norm(x, x.shape[-1:]))
        return x

    def busiest(self, x: Tensor) -> float:
        """Return how many times as many tokens as on average go to the busiest expert of the first layer."""
        block: Any = self.blocks[0]
        chosen = block.gate(nn.functional.rms_norm(x, x.shape[-1:])[0])[2]
        return float(chosen.flatten().bincount().max() * len(block.gate.weight) / chosen.numel())


def passes(model: Experts, x: Tensor) -> tuple[Tensor, ...]:
    """Make a forward and a backward pass. Return the output, the gradient of `x` and of the first layer's experts."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    (out * torch.linspace(-1, 1, out.shape[-1], device=out.device)).mean().backward()
    block: Any = model.blocks[0]
    return out.detach(), x.grad, block.experts.gate_up_proj.grad, block.experts.down_proj.grad  # type: ignore[return-value]


def bound(layers: int, tokens: int, widths: dict[str, int]) -> tuple[float, float, float]:
    """Return the operations of the experts' products in a forward and backward pass, the seconds in which a GPU
    computes them at its peak, and those in which it reads all weights twice and writes their gradients."""
    experts, k = widths["num_experts"], widths["num_experts_per_tok"]
    expert = 3 * widths["hidden_size"] * widths["moe_intermediate_size"]
    operations = 3 * 2.0 * layers * tokens * k * expert
    return operations, operations / PEAK_FLOPS, 3 * 2 * layers * experts * expert / BANDWIDTH


def table(model: Experts, x: Tensor, small: bool) -> dict[str, Any]:
    """Return seconds of each way in each round, forward alone and with backward, memory, and relative differences to
    the loop."""
    results, gib = {}, {}
    seconds: dict[str, dict[str, list[float]]] = {way: {"forward": [], "both": []} for way in WAYS}
    for way, name in WAYS.items():
        model.config._experts_implementation = name
        passes(model, x)
        clean()
        results[way] = passes(model, x)
        gib[way] = peak_gib()
    gaps = {
        way: [float((a - b).float().norm() / b.float().norm()) for a, b in zip(result, results["loop"], strict=True)]
        for way, result in results.items()
    }
    results.clear()
    for _ in range(1 if small else ROUNDS):
        for way, name in WAYS.items():
            model.config._experts_implementation = name
            with torch.no_grad():
                seconds[way]["forward"].append(timed(lambda: model(x)))
            seconds[way]["both"].append(timed(lambda: passes(model, x)))
    return {"busiest": model.busiest(x), "seconds": seconds, "gib": gib, "gaps": gaps}


def main(words: list[str]) -> None:
    small = words == ["small"]
    if words and not small:
        raise SystemExit(__doc__)
    if not small:
        need_gpu("python -m benchmarks.experts_gpu small")
    layers, tokens, widths = (2, 64, SMALL) if small else (LAYERS, TOKENS, WIDTHS)
    model = Experts(layers, widths, torch.bfloat16 if CUDA else torch.float32)
    operations, computed, moved = bound(layers, tokens, widths)
    print(f"{layers} layers, {tokens:,} tokens, {operations / 1e12:.3g} TFLOP forward and backward")
    print(f"bound: {1e3 * computed:.1f} ms at {PEAK_FLOPS / 1e12:.0f} TFLOP/s, {1e3 * moved:.1f} ms at 4.8 TB/s")
    random, tables = torch.Generator().manual_seed(1), {}
    common = torch.randn(widths["hidden_size"], generator=random)
    for load, weight in LOADS.items():
        each = torch.randn(1, tokens, widths["hidden_size"], generator=random)
        x = (each + weight * common).to(DEVICE, next(model.parameters()).dtype)
        tables[load] = row = table(model, x, small)
        print(f"{load} load: the busiest expert has {row['busiest']:.1f} times as many tokens as on average")
        for way in WAYS:
            forward, both = (row["seconds"][way][which] for which in ("forward", "both"))
            middle = statistics.median(both)
            print(
                f"{way:<13}{1e3 * middle:9.1f} ms ({1e3 * min(both):.1f} to {1e3 * max(both):.1f}), forward alone "
                f"{1e3 * statistics.median(forward):.1f} ms; MFU {operations / middle / PEAK_FLOPS:.3f}, "
                f"{middle / max(computed, moved):.2f} times the bound; {row['gib'][way]:.1f} GiB; output and gradients "
                f"from the loop's: {', '.join(f'{gap:.1e}' for gap in row['gaps'][way])}",
                flush=True,
            )
    if "OUT" in os.environ:
        device = torch.cuda.get_device_name() if CUDA else "cpu"
        document = {"device": device, "torch": torch.__version__, "layers": layers, "tokens": tokens, "loads": tables}
        document |= {"operations": operations, "bound": [computed, moved]}
        Path(os.environ["OUT"], "experts.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
