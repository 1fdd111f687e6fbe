"""The rollout viewer: a page that shows what the policy saw, said and earned, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from components.contracts.rollouts import Failure, LogProbs, Trajectory, Turn
from components.reports.embedded_images import EmbeddedImages, ImageReader
from components.reports.pages import inline_json, write_page

Decode = Callable[[int], str]
_MAX_RATIO_LOG = 20.0


@dataclass(frozen=True, eq=False)
class TurnScores:
    """What the trainer knows of one turn of C sampled tokens; None where it was not computed or not trained on."""

    trainer_logprobs: LogProbs | None = None  # (C,)
    advantages: npt.NDArray[np.float32] | None = None  # (C,)


@dataclass(frozen=True)
class Limits:
    """How much goes into one page; what is left out is counted on the page."""

    trajectories: int = 2000
    tokens: int = 400_000
    image_side: int = 512  # pixels; larger images are scaled down
    image_bytes: int = 24 * 2**20  # all embedded images together


@dataclass(frozen=True, eq=False)
class Rollouts:
    """What one page shows. `steps` and `scores` are by trajectory id, `scores` one entry per turn."""

    trajectories: Sequence[Trajectory]
    failures: Sequence[Failure] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, Sequence[TurnScores]] = field(default_factory=dict)


def write_viewer(
    path: Path,
    rollouts: Rollouts,
    *,
    images: ImageReader,
    decode: Decode,
    title: str = "Rollouts",
    limits: Limits | None = None,
) -> None:
    """Writes the page to `path`.

    Args:
        images: the image store; each image is read and embedded once.
        decode: one token id to its text, special tokens included.

    Raises:
        DataError: `images` has no such image, or it cannot be decoded.
    """
    limits = limits or Limits()
    shown = _select(rollouts, limits)
    book = EmbeddedImages(images, side=limits.image_side, budget=limits.image_bytes)
    pieces: dict[int, str] = {}

    def piece(token: int) -> str:
        if token not in pieces:
            pieces[token] = decode(token)
        return pieces[token]

    records = [_record(t, rollouts, book, piece) for t in shown]
    omitted = len(rollouts.trajectories) - len(shown)
    data = {
        "trajectories": records,
        "failures": [
            {"id": f.trajectory_id, "group": f.group_id, "task": f.task_id, "reason": f.reason, "detail": f.detail}
            for f in rollouts.failures
        ],
        "tokens": {str(token): text for token, text in sorted(pieces.items())},
        "images": book.images,
        "omitted": {"trajectories": omitted, "images": book.omitted},
    }
    values = {"title": title, "data": inline_json(data), "summary": _summary(rollouts)}
    write_page(path, "viewer.html", styles=("page.css", "viewer.css"), scripts=("viewer.js",), values=values)


def _summary(rollouts: Rollouts) -> list[tuple[str, str]]:
    rewards = [t.reward for t in rollouts.trajectories]
    groups = {t.group_id for t in rollouts.trajectories}
    drops = Counter(f.reason for f in rollouts.failures)
    lines = [
        ("trajectories", f"{len(rewards):,}"),
        ("groups", f"{len(groups):,}"),
        ("mean reward", f"{fmean(rewards):.3f}" if rewards else "none"),
        ("failures", f"{len(rollouts.failures):,}"),
    ]
    return lines + [(f"failed: {reason}", f"{n:,}") for reason, n in sorted(drops.items())]


def _select(rollouts: Rollouts, limits: Limits) -> list[Trajectory]:
    """Everything, or, past the limits, whole groups evenly spread over the run."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in rollouts.trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    tokens = sum(_length(t) for t in rollouts.trajectories)
    share = min(1.0, limits.trajectories / max(1, len(rollouts.trajectories)), limits.tokens / max(1, tokens))
    if share == 1.0:
        return list(rollouts.trajectories)
    names = list(groups)
    kept = max(1, int(len(names) * share))
    spread = [names[i * len(names) // kept] for i in range(kept)]
    return [trajectory for name in spread for trajectory in groups[name]]


def _length(trajectory: Trajectory) -> int:
    return sum(len(turn.completion_token_ids) for turn in trajectory.turns)


def _record(trajectory: Trajectory, rollouts: Rollouts, book: EmbeddedImages, piece: Decode) -> dict[str, Any]:
    scores = rollouts.scores.get(trajectory.trajectory_id, ())
    padded = [*scores, *[TurnScores()] * (len(trajectory.turns) - len(scores))]
    return {
        "id": trajectory.trajectory_id,
        "group": trajectory.group_id,
        "step": rollouts.steps.get(trajectory.trajectory_id),
        "environment": trajectory.environment,
        "task": trajectory.task_id,
        "split": trajectory.split,
        "truncated": trajectory.truncated,
        "reward": _number(trajectory.reward),
        "parts": {name: _number(value) for name, value in sorted(trajectory.reward_parts.items())},
        "turns": [_turn(turn, s, book, piece) for turn, s in zip(trajectory.turns, padded, strict=True)],
    }


def _turn(turn: Turn, scores: TurnScores, book: EmbeddedImages, piece: Decode) -> dict[str, Any]:
    ids = [int(token) for token in turn.completion_token_ids]
    for token in ids:
        piece(token)
    ratios = None
    if scores.trainer_logprobs is not None:
        gaps = np.asarray(scores.trainer_logprobs, np.float64) - turn.completion_logprobs
        ratios = [_number(exp(max(-_MAX_RATIO_LOG, min(_MAX_RATIO_LOG, g)))) if g == g else None for g in gaps]
    advantages = None
    if scores.advantages is not None and len(scores.advantages):
        first = float(scores.advantages[0])
        same = bool(np.all(scores.advantages == scores.advantages[0]))
        advantages = _number(first) if same else [_number(float(a)) for a in scores.advantages]
    return {
        "messages": turn.messages,
        "state": turn.anchor_key,
        "images": [book.add(ref) for ref in turn.images],
        "ids": ids,
        "logprobs": [_number(float(value)) for value in turn.completion_logprobs],
        "ratios": ratios,
        "advantages": advantages,
        "completion": turn.completion,
        "finish": turn.finish_reason,
        "version": turn.policy_version,
        "reward": _number(turn.reward),
        "parts": {name: _number(value) for name, value in sorted(turn.reward_parts.items())},
        "defect": turn.action_defect,
        "prompt_tokens": len(turn.prompt_token_ids),
        "seconds": [_number(turn.generate_seconds), _number(turn.environment_seconds)],
    }


def _number(value: float) -> float | None:
    """Five significant digits; None for what JSON cannot hold."""
    return float(f"{value:.5g}") if np.isfinite(value) else None
