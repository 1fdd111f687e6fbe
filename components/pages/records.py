"""JSON records of rollouts for the pages, with each token, its log-prob, importance ratio and advantage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from armature.components.contracts.batches import LogRatios, Sample
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Trajectory, Turn

Decode = Callable[[int], str]
ImageKey = Callable[[ImageRef], str]
_MAX_RATIO_LOG = 20.0
_NONE: LogRatios = np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class TurnScores:
    """The trainer's values for the C sampled tokens of one turn. A value is None if it was not computed, or if the turn
    was not trained on."""

    log_ratios: LogRatios | None = None  # (C,) log-prob under the trainer minus log-prob under the sampler
    advantages: npt.NDArray[np.float32] | None = None  # (C,)


def turn_scores(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], log_ratios: Mapping[str, LogRatios]
) -> dict[str, list[TurnScores]]:
    """Return the scores of each trajectory's turns, by trajectory id: the advantages of the sampled tokens, and their
    log-ratios if they are known.

    Trajectories with dropped turns are omitted, because their tokens cannot be assigned to turns.

    Args:
        samples: training samples of the trajectories.
        log_ratios: log-ratios of the trained tokens by sample id; samples may be missing.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        places[sample.trajectory_id].append(place)
    scores_of: dict[str, list[TurnScores]] = {}
    for trajectory in trajectories:
        masks = [(place, samples[place].loss_mask) for place in places[trajectory.trajectory_id]]
        ends = np.cumsum([len(turn.completion_token_ids) for turn in trajectory.turns])
        if ends[-1] != sum(int(mask.sum()) for _, mask in masks):
            continue
        advantages = np.split(np.concatenate([samples[place].advantages[mask] for place, mask in masks]), ends[:-1])
        ratios = [log_ratios.get(samples[place].sample_id, _NONE) for place, _ in masks]
        scored: Sequence[LogRatios | None] = [None] * len(advantages)
        if sum(map(len, ratios)) == ends[-1]:
            scored = np.split(np.concatenate(ratios), ends[:-1])
        scores_of[trajectory.trajectory_id] = [TurnScores(*scores) for scores in zip(scored, advantages, strict=True)]
    return scores_of


def rollout_record(
    trajectory: Trajectory, step: int | None, scores: Sequence[TurnScores], image_key: ImageKey, piece: Decode
) -> dict[str, Any]:
    """Return the JSON record of a rollout. In it, NaN and infinities are None.

    Args:
        scores: the trainer's values, one entry for each turn; empty: there are none.
        image_key: returns the key under which the page has an image.
        piece: called with each sampled token id, so that the page gets its text.
    """
    padded = [*scores, *[TurnScores()] * (len(trajectory.turns) - len(scores))]
    return {
        "id": trajectory.trajectory_id,
        "group": trajectory.group_id,
        "step": step,
        "environment": trajectory.environment,
        "task": trajectory.task_id,
        "split": trajectory.split,
        "truncated": trajectory.truncated,
        "reward": _number(trajectory.reward),
        "parts": {name: _number(value) for name, value in sorted(trajectory.reward_parts.items())},
        "turns": [_turn(turn, s, image_key, piece) for turn, s in zip(trajectory.turns, padded, strict=True)],
    }


def _turn(turn: Turn, scores: TurnScores, image_key: ImageKey, piece: Decode) -> dict[str, Any]:
    ids = [int(token) for token in turn.completion_token_ids]
    for token in ids:
        piece(token)
    ratios = None
    if scores.log_ratios is not None:
        gaps = scores.log_ratios.tolist()
        ratios = [_number(exp(max(-_MAX_RATIO_LOG, min(_MAX_RATIO_LOG, g)))) if g == g else None for g in gaps]
    advantages = None
    if scores.advantages is not None and len(scores.advantages):
        first = float(scores.advantages[0])
        same = bool(np.all(scores.advantages == scores.advantages[0]))
        advantages = _number(first) if same else [_number(float(a)) for a in scores.advantages]
    return {
        "messages": turn.messages,
        "state": turn.anchor_key,
        "images": [image_key(ref) for ref in turn.images],
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
        "calls": [[call.name, call.status] for call in turn.tool_calls],
        "prompt_tokens": len(turn.prompt_token_ids),
        "seconds": [_number(turn.generate_seconds), _number(turn.environment_seconds)],
    }


def _number(value: float) -> float | None:
    """Return a number rounded to five significant digits; None for NaN and infinities."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def token_decoder(checkpoint: Path) -> Callable[[int], str]:
    """Return a function that returns the text of one token id, using the `tokenizer.json` of a checkpoint.

    Special tokens have a text too. The text of a token that is only part of a character is U+FFFD.

    Raises:
        DataError: the folder has no readable `tokenizer.json`.
    """
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises Exception itself, with no class of its own
        raise DataError(
            f"the tokenizer cannot be read: {error}",
            code="tokenizer_unreadable",
            where=str(path),
            remedy="save the processor to the checkpoint",
        ) from error

    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return decode
