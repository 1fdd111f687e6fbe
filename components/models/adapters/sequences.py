"""Turn rollouts into training sequences, using only the token ids that the server returned."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from armature.components.contracts.batches import Sample, TurnAdvantages
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import MAX_LOGPROB, Experts, TokenIds, Trajectory, Turn


def turn_defect(turn: Turn, forbidden: Collection[int], max_tokens: int | None) -> str | None:
    """Return a short reason why `turn` cannot be trained on, or None if it can. Dropped turns are counted by this
    reason."""
    tokens, logprobs = turn.completion_token_ids, turn.completion_logprobs
    if len(tokens) == 0:
        return "empty_completion"
    if len(turn.prompt_token_ids) == 0:
        return "empty_prompt"
    if len(logprobs) == 0:
        return "logprobs_missing"
    if len(logprobs) != len(tokens):
        return "logprobs_length"
    if not np.isfinite(logprobs).all():
        return "logprobs_not_finite"
    if (np.asarray(logprobs) > MAX_LOGPROB).any():
        return "logprobs_positive"
    if not set(np.asarray(tokens).tolist()).isdisjoint(forbidden):
        return "placeholder_sampled"
    if max_tokens is not None and len(turn.prompt_token_ids) + len(tokens) > max_tokens:
        return "too_long"
    return None


def runs_fit(ids: TokenIds, feature_token: int, runs: Sequence[int]) -> bool:
    """True if the feature tokens in `ids` are exactly the consecutive `runs` that the images need, in order.

    Example:
        >>> runs_fit(np.array([5, 9, 9, 5, 9]), feature_token=9, runs=[2, 1])
        True
    """
    positions = np.flatnonzero(np.asarray(ids) == feature_token)
    if len(positions) != sum(runs):
        return False
    start = 0
    for run in runs:
        if positions[start + run - 1] - positions[start] != run - 1:
            return False
        start += run
    return True


@dataclass
class _OpenSequence:
    """A sequence that a later turn may extend: its ids and images so far, and the turns that it trains on."""

    ids: TokenIds
    images: tuple[ImageRef, ...]
    turns: list[Turn]

    def is_extended_by(self, turn: Turn) -> bool:
        """True if the turn's prompt begins with this sequence's ids and its images with this sequence's images."""
        prompt = turn.prompt_token_ids
        return (
            len(prompt) >= len(self.ids)
            and turn.images[: len(self.images)] == self.images
            and np.array_equal(prompt[: len(self.ids)], self.ids)
        )


def merge_turns(turns: Sequence[Turn], merge: bool) -> list[list[Turn]]:
    """Group turns into sequences. Without `merge`, each turn is a sequence of its own.

    A turn joins the newest sequence whose ids (prompt and completion) its prompt begins with, and whose images its
    images begin with; otherwise it starts a sequence. So no token is trained on twice, and no text is tokenized again.
    """
    sequences: list[_OpenSequence] = []
    for turn in turns:
        ids = np.concatenate([turn.prompt_token_ids, turn.completion_token_ids])
        earlier = next((one for one in reversed(sequences) if merge and one.is_extended_by(turn)), None)
        if earlier is None:
            sequences.append(_OpenSequence(ids, turn.images, [turn]))
        else:
            earlier.ids, earlier.images = ids, turn.images
            earlier.turns.append(turn)
    return [sequence.turns for sequence in sequences]


def sample_of(trajectory: Trajectory, turns: Sequence[Turn], advantages: TurnAdvantages | None = None) -> Sample:
    """Return one training sequence of `turns`, each of which extends the previous one; the last one has all tokens and
    images.

    All tokens sampled in a turn get the turn's advantage, or 0 without `advantages`.
    """
    last = turns[-1]
    ids = np.concatenate([last.prompt_token_ids, last.completion_token_ids]).astype(np.int32)
    mask = np.zeros(len(ids), dtype=np.bool_)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    versions = np.full(len(ids), -1, dtype=np.int32)
    values = np.zeros(len(ids), dtype=np.float32)
    experts: Experts | None = None
    if last.experts is not None and all(turn.experts is not None for turn in turns):
        experts = np.full((len(ids), *last.experts.shape[1:]), -1, dtype=np.int16)
        for turn in reversed(turns):  # later turns began with what the server had computed in the earlier ones
            assert turn.experts is not None
            experts[: len(turn.experts)] = turn.experts
    for turn in turns:
        start = len(turn.prompt_token_ids)
        sampled = slice(start, start + len(turn.completion_token_ids))
        mask[sampled] = True
        logprobs[sampled] = turn.completion_logprobs
        versions[sampled] = turn.policy_version
        if advantages is not None:
            values[sampled] = advantages[trajectory.trajectory_id, turn.index]
    return Sample(
        sample_id=f"{trajectory.trajectory_id}/{'-'.join(str(turn.index) for turn in turns)}",
        group_id=trajectory.group_id,
        trajectory_id=trajectory.trajectory_id,
        input_ids=ids,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        policy_versions=versions,
        advantages=values,
        reward=trajectory.reward,
        images=last.images,
        experts=experts,
    )
