"""Metrics of one training step: collected over its micro-batches, and summed over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from armature.components.contracts.batches import LogRatios, Sample
from armature.components.training.ranks import Ranks
from armature.components.vlm.objectives import Loss, Tokens
from armature.components.vlm.packing import MicroBatch

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
PER_TOKEN = {
    "importance_ratio": "importance_ratio",
    "entropy": "entropy",
    "mismatch_kl": "mismatch_kl",
    "kl_reference": "kl_reference",
    "teacher": "teacher/loss",
    "masked_low": "masked_low_fraction",
    "masked_high": "masked_high_fraction",
    "ratio_out_of_range": "ratio/out_of_range_fraction",
    "advantage_abs": "advantage/token_absmean",
    "weight": "correction/mean_weight",
    "weight_floored": "correction/floored_fraction",
    "weight_capped": "correction/capped_fraction",
}
"""Names of sums in `Loss.sums`, mapped to the names of the metrics that are their means over trained tokens."""
ALWAYS = ("importance_ratio", "entropy", "mismatch_kl", "masked_low", "masked_high", "ratio_out_of_range")
"""Names of the sums that every step with trained tokens reports."""


@dataclass(frozen=True)
class _Added:
    """The numbers of one micro-batch. Tensors may still be on their way from a GPU to the CPU."""

    rows: Sequence[int]
    """Position of each row in the batch, -1 for a dummy."""
    lengths: Tensor
    """Number of trained tokens of each row."""
    log_ratios: Tensor
    """Log-ratio of each trained token: its log-prob under the trained model minus its log-prob under the sampler."""
    names: Sequence[str]
    sums: Tensor
    """The sums of `Loss.sums`, one for each name in `names`."""
    computed: int


class Meter:
    """Collects the numbers of a step on every rank, and reports them over all ranks.

    In a step with several updates `mismatch_kl` includes the changes that earlier updates made. Only
    `mismatch_kl/first_update`, over the tokens of the first update, compares trainer and sampler at equal weights.
    """

    def __init__(self) -> None:
        counted = ("loss", "tokens", "first_tokens", "first_mismatch_kl")
        self.sums: dict[str, float] = defaultdict(float, dict.fromkeys((*ALWAYS, *counted), 0.0))
        self.rows: list[tuple[int, int]] = []
        self.log_ratios: list[Tensor] = []
        self.grad_norms: list[float] = []
        self.skipped = 0
        self._waiting: list[_Added] = []
        self.experts: dict[str, float] = {}
        """Counts of this rank; see `RouterHooks.take_counts`."""

    def add(self, micro: MicroBatch, tokens: Tokens, loss: Loss, scale: float, computed: int) -> None:
        """Add the numbers of a micro-batch, whose loss has the factor `scale`.

        This does not wait for the GPU; `update` does.

        Args:
            computed: number of tokens that a packed micro-batch computed, where a prompt that rows share counts once; 0
                without packing.
        """
        ratios = (tokens.logprobs - tokens.behavior).detach().float()
        sums = torch.stack([*loss.sums.values(), loss.total.detach().double() * scale])
        lengths, ratios, sums = (value.to("cpu", non_blocking=True) for value in (tokens.lengths, ratios, sums))
        self._waiting.append(_Added(micro.rows, lengths, ratios, (*loss.sums, "loss"), sums, computed))

    def discard(self) -> None:
        """Forget the micro-batches added since the last update, which are computed again."""
        self._waiting.clear()

    def update(self, grad_norm: float, applied: bool) -> None:
        """Count an optimizer update of the micro-batches added since the last one.

        The caller has read the gradient norm, so all tensors of these micro-batches have arrived on the CPU.
        """
        for added in self._waiting:
            self._count(added)
        self._waiting.clear()
        self.grad_norms.append(grad_norm)
        self.skipped += not applied

    def _count(self, added: _Added) -> None:
        sums = dict(zip(added.names, added.sums.tolist(), strict=True))
        for name, value in sums.items():
            self.sums[name] += value
        self.sums["tokens"] += len(added.log_ratios)
        if added.computed:
            self.sums["computed"] += added.computed
        if not self.grad_norms:
            self.sums["first_tokens"] += len(added.log_ratios)
            self.sums["first_mismatch_kl"] += sums["mismatch_kl"]
        self.rows += zip(added.rows, added.lengths.tolist(), strict=True)
        self.log_ratios.append(added.log_ratios)

    def report(self, ranks: Ranks, peak_gib: float) -> tuple[dict[str, float], dict[int, LogRatios]]:
        """Return the metrics of the step over all ranks, and the log-ratios of its tokens. Every rank calls it.

        Args:
            peak_gib: peak memory of this rank; the report has the maximum over ranks.

        Returns:
            Two dictionaries. The first has the metrics by name: if there are trained tokens, means over them and
            quantiles of the ratio. The second has the log-ratios (T,) of each sample's T trained tokens, by the
            sample's position in the batch. A log-ratio is the log-prob under the weights at the beginning of the
            sample's update, minus the sampler's log-prob.
        """
        values = torch.cat(self.log_ratios) if self.log_ratios else torch.empty(0)
        mine: dict[str, Any] = {"rows": self.rows, "values": values, "sums": dict(self.sums), "experts": self.experts}
        parts = ranks.gather(mine | {"peak_gib": peak_gib})
        log_ratios: dict[int, LogRatios] = {}
        for part in parts:
            pieces = part["values"].split([length for _, length in part["rows"]])
            pairs = zip(part["rows"], pieces, strict=True)
            log_ratios |= {row: piece.numpy() for (row, _), piece in pairs if len(piece)}
        _, sharing = ranks.part
        # Ranks that share sequences have the same sums: count the first one. A rank without micro-batches lacks some.
        counted = [part["sums"] for part in parts[::sharing]]
        sums = {name: sum(part.get(name, 0.0) for part in counted) for part in counted for name in part}
        tokens = sums.pop("tokens")
        report = {"loss": sums.pop("loss") / max(len(self.grad_norms), 1)}
        first, mismatch = sums.pop("first_tokens"), sums.pop("first_mismatch_kl")
        if first:
            report["mismatch_kl/first_update"] = mismatch / first
        experts = [part["experts"] for part in parts]
        for name in ("experts/busiest", "experts/unused_fraction"):
            if shares := [one[name] for one in experts if name in one]:
                report[name] = max(shares)
        if compared := sum(one.get("experts_compared", 0.0) for one in experts):
            report["experts/other_fraction"] = sum(one.get("experts_other", 0.0) for one in experts) / compared
        if "computed" in sums:
            report["tokens/computed"] = sums.pop("computed")
        if tokens:
            report |= {PER_TOKEN[name]: value / tokens for name, value in sums.items()}
            report["masked_fraction"] = report["masked_low_fraction"] + report["masked_high_fraction"]
        report |= _quantiles(np.concatenate([*log_ratios.values(), np.empty(0, np.float32)]))
        report["grad_norm"] = float(np.mean(self.grad_norms)) if self.grad_norms else 0.0
        report["updates"] = float(len(self.grad_norms))
        report["updates_skipped"] = float(self.skipped)
        report["memory/peak_gib"] = max(part["peak_gib"] for part in parts)
        return report, log_ratios


def _quantiles(log_ratios: LogRatios) -> dict[str, float]:
    """Return quantiles of the ratio exp(log-ratio) over all trained tokens; empty without tokens."""
    if not len(log_ratios):
        return {}
    with np.errstate(over="ignore"):
        points = np.exp(np.quantile(log_ratios, [0.0, *QUANTILES.values(), 1.0], method="nearest").astype(np.float64))
    return dict(zip(("ratio/min", *(f"ratio/{name}" for name in QUANTILES), "ratio/max"), points.tolist(), strict=True))


def batch_report(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of a step's samples: rewards, groups, lengths in tokens, images and policy versions."""
    if not samples:
        return {"sequences": 0.0, "tokens/trained": 0.0, "tokens/total": 0.0}
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([len(sample.input_ids) for sample in samples])
    trained = np.array([int(sample.loss_mask[1:].sum()) for sample in samples])
    versions = np.concatenate([sample.policy_versions[sample.loss_mask] for sample in samples])
    groups: dict[str, bool] = defaultdict(bool)
    for sample in samples:
        groups[sample.group_id] |= bool(np.any(sample.advantages))
    report = {
        "reward/sample_mean": float(rewards.mean()),
        "reward/sample_std": float(rewards.std()),
        "groups": float(len(groups)),
        "groups_without_signal": float(sum(not signal for signal in groups.values())),
        "sequences": float(len(samples)),
        "tokens/trained": float(trained.sum()),
        "tokens/total": float(lengths.sum()),
        "tokens/trained_per_sequence": float(trained.mean()),
        "tokens/longest": float(lengths.max()),
        "images": float(sum(len(sample.images) for sample in samples)),
        "images/distinct": float(len({ref.sha256 for sample in samples for ref in sample.images})),
    }
    if len(versions):
        report |= {"policy_version/min": float(versions.min()), "policy_version/max": float(versions.max())}
    return report
