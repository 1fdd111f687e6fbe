"""Log-probs and entropies of a linear head on a GPU, forward and backward: every backend, TRL's and Liger's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from armature.components.vlm.heads.backends import HEADS, HeadSettings
from benchmarks.step_case import need_gpu

VOCABULARY, WIDTHS, TOKENS = 151_936, (2048, 2560, 3584), (4096, 8192, 16_384)
CHUNK, ROUNDS = 2048, 5
PEAK_FLOPS = 989e12
"""Peak bf16 operations per second of an H200 SXM without sparsity, from its data sheet."""
ONCE = ("all logits", "normal", "liger, one gradient for all")
"""Names of the implementations that compute the logits only once."""

Step = Callable[[Tensor, nn.Linear, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, head: nn.Linear, targets: Tensor, scale: Tensor) -> Tensor:
    logprobs = head(hidden).float().log_softmax(-1)
    with torch.no_grad():
        -(logprobs.exp() * logprobs).sum(-1)
    return (logprobs.gather(-1, targets[:, None]).squeeze(-1) * scale).sum()


def ours(name: str, chunk: int = CHUNK) -> Step:
    """Return a step with our log-probs backend `name`. The backend is made once and used in all steps, as in a
    policy."""
    device = torch.device("cuda")
    anything = nn.Linear(8, VOCABULARY, bias=False, device=device, dtype=torch.bfloat16)
    backend = HEADS[name](HeadSettings(1.0, None, chunk), anything, device)
    forbidden = torch.zeros(VOCABULARY, dtype=torch.bool, device=device)

    def step(hidden: Tensor, head: nn.Linear, targets: Tensor, scale: Tensor) -> Tensor:
        logprobs, _ = backend(head, hidden, targets, forbidden)
        loss: Tensor = (logprobs * scale).sum()
        return loss

    return step


def liger(reduction: str) -> Step:
    """Return a step with Liger's loss, which computes no entropy. With "none" each token has its own gradient, as a
    policy needs. With "mean" all tokens share one, which saves a pass."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def step(hidden: Tensor, head: nn.Linear, targets: Tensor, scale: Tensor) -> Tensor:
        arguments: list[Any] = [hidden, head.weight, targets, None, None, -100, 0.0, 0.0, reduction]
        loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]
        return -(loss * scale).sum() if reduction == "none" else loss

    return step


def trl(hidden: Tensor, head: nn.Linear, targets: Tensor, scale: Tensor) -> Tensor:
    """Compute the loss with TRL's chunked output head: log-probs and entropies from its Triton kernels."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    wanted = ("log_probs", "entropy")
    result = ChunkedLogProbFunction.apply(hidden, head.weight, None, targets, 1.0, 32_768, None, 1.0, wanted)
    loss: Tensor = (result[0] * scale).sum()
    return loss


@dataclass(frozen=True)
class Figure:
    """Median time of a forward and backward pass. `gib` is the peak memory in addition to hidden states and weight; it
    includes the gradients."""

    width: int
    tokens: int
    name: str
    ms: float | None  # it is None if memory ran out
    gib: float | None
    roofline: float | None  # the operations it cannot do without, at the chip's peak, over the time


def record() -> None:
    """Measure everything and write the results to the benchmark page.

    The least that forward and backward can do is 8 N V D operations: the logits twice, and the products for both
    gradients; or 6, where logits are kept or each token's gradient is known in the forward pass. What they must move,
    6 (N + V) D bytes each way, takes little time beside it.
    """
    from benchmarks.table import write

    need_gpu("python -m benchmarks.run logprobs")
    steps = {"all logits": all_logits, "normal": ours("normal"), "torch": ours("torch"), "triton": ours("triton")}
    steps["triton, 512"] = ours("triton", 512)
    if find_spec("trl"):
        steps["trl"] = trl
    if find_spec("liger_kernel"):
        steps |= {"liger": liger("none"), "liger, one gradient for all": liger("mean")}
    figures, ceilings = [], {}
    for width in WIDTHS:
        for tokens in TOKENS:
            figures += _size(width, tokens, steps)
            ceilings[f"{width} {tokens}"] = _product(width, tokens) / PEAK_FLOPS
            print(*(f"  {figure}" for figure in figures[-len(steps) :]), sep="\n", flush=True)
            print(f"  one product by cuBLAS: {ceilings[f'{width} {tokens}']:.2f} of the peak", flush=True)
    write(
        "logprobs-gpu",
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "figures": [asdict(f) for f in figures],
            "ceilings": ceilings,
        },
    )


def _size(width: int, tokens: int, steps: dict[str, Step]) -> list[Figure]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    head = nn.Linear(width, VOCABULARY, bias=False, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.normal_(std=3 / width**0.5)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets, scale = torch.randint(VOCABULARY, (tokens,), device=device), torch.randn(tokens, device=device)

    def once(step: Step) -> tuple[float, float]:
        head.weight.grad = hidden.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(hidden, head, targets, scale).backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 2**30

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    gradients: dict[str, Tensor] = {}
    for round_ in range(ROUNDS + 1):  # the first warms up
        for name, step in steps.items():
            try:
                result = once(step)
            except torch.OutOfMemoryError:
                taken[name], result = [], None
            if result and round_:
                taken[name].append(result)
            elif hidden.grad is not None and not name.endswith("for all"):
                gradients[name] = hidden.grad.clone()
            head.weight.grad = hidden.grad = None
    for name, gradient in gradients.items():
        gap = (gradient.float() - gradients["triton"].float()).norm() / gradients["triton"].float().norm()
        assert gap < 0.05, (name, gap)
    figures = []
    for name, pairs in taken.items():
        ms, gib = (statistics.median(column) for column in zip(*pairs, strict=True)) if pairs else (None, None)
        least = (6 if name in ONCE else 8) * tokens * VOCABULARY * width / PEAK_FLOPS
        figures.append(Figure(width, tokens, name, ms, gib, least / (ms / 1e3) if ms else None))
    return figures


def _product(width: int, tokens: int) -> float:
    """Return the operations per second of one cuBLAS product of this width: the most that a kernel can hope to
    reach."""
    a = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(VOCABULARY // 4, width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(tokens, len(b), device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(ROUNDS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(a, b.t(), out=out)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * tokens * len(b) * width / statistics.median(times[1:])
