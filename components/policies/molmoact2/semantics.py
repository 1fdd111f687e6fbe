"""What the three published versions do differently when they train.

A fourth difference is not kept as an option: the seed's and 0.6.1's padding on the right counted as context for the
action expert, so that an example's loss depended on the lengths of its neighbors in the batch. Here padding is
never context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from armature.components.policies.settings import ActionMode, Semantics


@dataclass(frozen=True)
class TrainingSemantics:
    """Per version of LeRobot's policy.

    bidirectional_images: action modes trained with all image tokens of an example visible to each other.
    hides_answers: action modes whose expert does not attend to EOS (hence BOS and the end of the user's turn, which
    are the
        same token) nor what stands between the start and the end of discrete actions.
    supervises_past_end: the repeated last action beyond an episode's end is trained like any other.
    pad_side: where a row of a batch is padded.
    """

    bidirectional_images: frozenset[ActionMode]
    hides_answers: frozenset[ActionMode]
    supervises_past_end: bool
    pad_side: Literal["left", "right"]


_ALL: frozenset[ActionMode] = frozenset({"continuous", "discrete", "both"})
_BEFORE = TrainingSemantics(_ALL, _ALL, supervises_past_end=False, pad_side="right")
SEMANTICS: dict[Semantics, TrainingSemantics] = {
    "head": TrainingSemantics(frozenset({"discrete"}), frozenset({"both"}), supervises_past_end=True, pad_side="left"),
    "0.6.1": _BEFORE,
    "seed": _BEFORE,
}
