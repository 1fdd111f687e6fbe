"""What one training step says about itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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
    "masked_low": "masked_low_fraction",
    "masked_high": "masked_high_fraction",
    "ratio_out_of_range": "ratio/out_of_range_fraction",
    "advantage_abs": "advantage/token_absmean",
    "weight": "correction/mean_weight",
    "weight_floored": "correction/floored_fraction",
    "weight_capped": "correction/capped_fraction",
}
"""Sums of a loss, and the name of their mean over the trained tokens."""
ALWAYS = ("importance_ratio", "entropy", "mismatch_kl", "masked_low", "masked_high", "ratio_out_of_range")
"""Of these, what every step reports: 0 where no token was trained on."""


@dataclass(frozen=True)
class _Added:
    """Of a micro-batch: its rows, the trained tokens of each, log-ratios to the sampler, and sums with their names.
    Tensors are on their way to the CPU.
    """

    rows: Sequence[int]
    lengths: Tensor
    log_ratios: Tensor
    names: Sequence[str]
    sums: Tensor


class Meter:
    """Collects sums over the micro-batches of a step, on every rank, and reports them over all ranks.

    In a step of several updates `mismatch_kl` also has what the earlier ones changed; `mismatch_kl/first_update` is
    over the tokens of the first one alone, so it compares the two engines and nothing else.
    """

    def __init__(self) -> None:
        counted = ("loss", "tokens", "first_tokens", "first_mismatch_kl")
        self.sums: dict[str, float] = defaultdict(float, dict.fromkeys((*ALWAYS, *counted), 0.0))
        self.rows: list[tuple[int, int]] = []
        self.log_ratios: list[Tensor] = []
        self.grad_norms: list[float] = []
        self.skipped = 0
        self._waiting: list[_Added] = []

    def add(self, micro: MicroBatch, tokens: Tokens, loss: Loss, scale: float) -> None:
        """One micro-batch: its loss counts `scale` times. A GPU is not waited for: the update does that."""
        ratios = (tokens.logprobs - tokens.behavior).detach().float()
        sums = torch.stack([*loss.sums.values(), loss.total.detach().double() * scale])
        lengths, ratios, sums = (value.to("cpu", non_blocking=True) for value in (tokens.lengths, ratios, sums))
        self._waiting.append(_Added(micro.rows, lengths, ratios, (*loss.sums, "loss"), sums))

    def add_packed(self, tokens: int) -> None:
        """What a packed micro-batch has computed: those of a prompt once."""
        self.sums["computed"] += tokens

    def update(self, grad_norm: float, applied: bool) -> None:
        """One optimizer update, of the micro-batches that were added since the last; their norm has been read."""
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
        if not self.grad_norms:
            self.sums["first_tokens"] += len(added.log_ratios)
            self.sums["first_mismatch_kl"] += sums["mismatch_kl"]
        self.rows += zip(added.rows, added.lengths.tolist(), strict=True)
        self.log_ratios.append(added.log_ratios)

    def report(self, ranks: Ranks, peak_gib: float) -> tuple[dict[str, float], dict[int, LogRatios]]:
        """Means over the trained tokens of all ranks (0 where there are none), quantiles of the raw ratio, and the most
        memory that one of them took.

        Returns:
            The report, and (T,) the log-prob of each of the T trained tokens less the sampler's, by the position of a
            sample in the batch. The log-prob is that of the weights that the sample's own update began with.
        """
        values = torch.cat(self.log_ratios) if self.log_ratios else torch.empty(0)
        own = {"rows": self.rows, "values": values, "sums": dict(self.sums), "peak_gib": peak_gib}
        parts = ranks.gather(own)
        log_ratios: dict[int, LogRatios] = {}
        for part in parts:
            pieces = part["values"].split([length for _, length in part["rows"]])
            found = zip(part["rows"], pieces, strict=True)
            log_ratios |= {row: piece.numpy() for (row, _), piece in found if len(piece)}
        _, sharing = ranks.part
        # Of ranks that share their tokens the first one counts. One without micro-batches lacks some of the sums.
        counted = [part["sums"] for part in parts[::sharing]]
        sums = {name: sum(part.get(name, 0.0) for part in counted) for part in counted for name in part}
        tokens = max(sums.pop("tokens"), 1.0)
        report = {"loss": sums.pop("loss") / max(len(self.grad_norms), 1)}
        first, mismatch = sums.pop("first_tokens"), sums.pop("first_mismatch_kl")
        if first:
            report["mismatch_kl/first_update"] = mismatch / first
        if "computed" in sums:
            report["tokens/computed"] = sums.pop("computed")
        report |= {PER_TOKEN[name]: value / tokens for name, value in sums.items()}
        report["masked_fraction"] = report["masked_low_fraction"] + report["masked_high_fraction"]
        report |= _quantiles(np.concatenate([*log_ratios.values(), np.empty(0, np.float32)]))
        report["grad_norm"] = float(np.mean(self.grad_norms)) if self.grad_norms else 0.0
        report["updates"] = float(len(self.grad_norms))
        report["updates_skipped"] = float(self.skipped)
        report["memory/peak_gib"] = max(part["peak_gib"] for part in parts)
        return report, log_ratios


def _quantiles(log_ratios: LogRatios) -> dict[str, float]:
    if not len(log_ratios):
        return {}
    with np.errstate(over="ignore"):
        points = np.exp(np.quantile(log_ratios, [0.0, *QUANTILES.values(), 1.0], method="nearest").astype(np.float64))
    return dict(zip(("ratio/min", *(f"ratio/{name}" for name in QUANTILES), "ratio/max"), points.tolist(), strict=True))


def batch_report(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, groups, lengths and versions of the samples of a step. Lengths are in tokens."""
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
