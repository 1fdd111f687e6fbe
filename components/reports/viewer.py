"""The rollout viewer: a page that shows what the policy saw, said and earned, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from armature.components.contracts.rollouts import Failure, Trajectory
from armature.components.reports.embedded_images import EmbeddedImages, ImageReader
from armature.components.reports.pages import inline_json, write_page
from armature.components.reports.records import Decode, TurnScores, rollout_record


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

    records = []
    for each in shown:
        step, scores = rollouts.steps.get(each.trajectory_id), rollouts.scores.get(each.trajectory_id, ())
        records.append(rollout_record(each, step, scores, book.add, piece))
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
    scripts = ("rollout.js", "viewer.js")
    write_page(path, "viewer.html", styles=("page.css", "viewer.css"), scripts=scripts, values=values)


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
