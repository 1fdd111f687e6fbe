"""Anchors group the turns that are at the same state."""

from __future__ import annotations

from difflib import SequenceMatcher

from hypothesis import given
from hypothesis import strategies as st

from armature.components.contracts.episodes import Observation
from armature.components.contracts.rollouts import Turn
from armature.components.rollouts.batches.advantages import anchor_labels, similar
from armature.components.rollouts.settings import AdmissibleAnchors, ExactAnchors, SimilarAnchors
from tests.builders import make_turn


def at(*states: tuple[str | None, tuple[str, ...] | None]) -> list[Turn]:
    seen = [Observation((), admissible_actions=actions, anchor_key=key) for key, actions in states]
    return [make_turn(anchor_key=each.anchor_key, admissible_key=each.admissible_key) for each in seen]


def test_groups_states_by_key_and_admissible_actions():
    turns = at(
        ("a desk", ("look", "go to desk 1")),
        ("a desk", ("go to desk 1", "look")),
        ("a desk", ("look",)),
        ("a desk", None),
        ("a lamp", ("look",)),
    )
    assert anchor_labels(turns, ExactAnchors(name="exact")).tolist() == [0, 0, 0, 0, 1]
    assert anchor_labels(turns, AdmissibleAnchors(name="admissible")).tolist() == [0, 0, 1, 2, 3]


def test_turn_without_state_key_is_its_own_group():
    turns = at((None, ("look",)), ("a desk", ("look",)), (None, ("look",)), ("a desk", ("look",)))
    for anchor in (
        ExactAnchors(name="exact"),
        AdmissibleAnchors(name="admissible"),
        SimilarAnchors(name="similar", threshold=0.5),
    ):
        assert anchor_labels(turns, anchor).tolist() == [0, 1, 2, 1]


def test_long_texts_with_early_difference_are_similar():
    rest = "a cabinet, a drawer, " * 14
    one, other = "a cabinet, a drawer, " + rest, "a drawer, a cabinet, " + rest
    assert SequenceMatcher(None, one, other).ratio() < 0.1  # frequent characters taken for junk
    assert similar([one, other, None], 0.95) == [one, one, None]


@given(texts=st.lists(st.text("ab", max_size=6), max_size=12), threshold=st.sampled_from([0.2, 0.5, 0.9]))
def test_state_clusters_equal_a_plain_loop(texts, threshold):
    firsts: list[str] = []
    expected = []
    for text in texts:
        close = [one for one in firsts if SequenceMatcher(None, one, text, autojunk=False).ratio() >= threshold]
        if not close:
            firsts.append(text)
        expected.append((close or [text])[0])
    assert similar(texts, threshold) == expected


@given(st.lists(st.text(max_size=4), max_size=6))
def test_admissible_action_key_ignores_order(actions):
    key = Observation((), admissible_actions=tuple(actions)).admissible_key
    assert key == Observation((), admissible_actions=tuple(reversed(actions + actions))).admissible_key
    assert key != Observation((), admissible_actions=(*actions, "another action")).admissible_key
    assert Observation(()).admissible_key is None
