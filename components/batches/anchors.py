"""Which turns of a task's rollouts began at the same state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

import numpy as np
import numpy.typing as npt

from armature.components.batches.settings import AdmissibleAnchors, ExactAnchors, SimilarAnchors
from armature.components.contracts.rollouts import Turn

Labels = npt.NDArray[np.int64]


def anchor_labels(turns: Sequence[Turn], anchor: ExactAnchors | AdmissibleAnchors | SimilarAnchors) -> Labels:
    """(N,) turns at the same state have the same number. A turn whose state has no name is at one of its own."""
    if isinstance(anchor, SimilarAnchors):
        keys: list[Hashable] = list(similar([turn.anchor_key for turn in turns], anchor.threshold))
    elif isinstance(anchor, AdmissibleAnchors):
        keys = [None if turn.anchor_key is None else (turn.anchor_key, turn.admissible_key) for turn in turns]
    else:
        keys = [turn.anchor_key for turn in turns]
    numbers: dict[Hashable, int] = {}
    named = (place if key is None else key for place, key in enumerate(keys))
    return np.array([numbers.setdefault(key, len(numbers)) for key in named], dtype=np.int64)


def similar(texts: Sequence[str | None], threshold: float) -> list[str | None]:
    """For each text the first one of its cluster: the earliest cluster whose first text it resembles takes it.

    Characters are compared without difflib's heuristic that takes frequent ones for junk: from 200 characters on
    it can make nearly equal texts look like nothing of each other.
    """
    firsts: list[str] = []
    found: dict[str, str] = {}
    matcher: SequenceMatcher[str] = SequenceMatcher(None, autojunk=False)
    for text in texts:
        if text is None or text in found:
            continue
        matcher.set_seq2(text)
        for first in firsts:
            matcher.set_seq1(first)
            if (
                matcher.real_quick_ratio() >= threshold  # two cheap upper bounds first
                and matcher.quick_ratio() >= threshold
                and matcher.ratio() >= threshold
            ):
                found[text] = first
                break
        else:
            firsts.append(text)
            found[text] = text
    return [None if text is None else found[text] for text in texts]
