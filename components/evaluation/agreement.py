"""Agreement of an evaluation with a replay of some of its episodes: how many are needed, which ones, what they say.

Sources. Number of episodes: the hypergeometric distribution, as in acceptance sampling and in audits of elections.
Comparison of outcomes: the exact sign test on the episodes that differ (Q. McNemar, "Note on the sampling error of the
difference between correlated proportions", Psychometrika 12 (1947)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, comb
from random import Random
from typing import Protocol, TypeVar

from armature.components.machine.versions import COMMIT


class Claim(Protocol):
    """The claim about one episode. Two claims are equal if all bits are."""

    @property
    def name(self) -> str:
        """Name of the episode in its evaluation."""

    @property
    def finished(self) -> bool:
        """True if the episode was played to its end."""

    @property
    def solved(self) -> bool:
        """True if it was a success."""


ClaimT = TypeVar("ClaimT", bound=Claim)


def detection_probability(episodes: int, falsified: int, replayed: int, differing: int = 1) -> Fraction:
    """Return the probability that at least `differing` of `replayed` random episodes are among the falsified ones.

        1 - sum over j < d of C(F, j) C(N - F, k - j) / C(N, k)

    Args:
        episodes: number N of all episodes.
        falsified: number F of falsified episodes.
        replayed: number k of replayed episodes, which are drawn without replacement.
        differing: number d of falsified episodes that is needed.

    Example:
        >>> detection_probability(episodes=10, falsified=1, replayed=3)
        Fraction(3, 10)
    """
    most = min(differing, replayed + 1)
    missed = sum(comb(falsified, j) * comb(episodes - falsified, replayed - j) for j in range(most))
    return 1 - Fraction(missed, comb(episodes, replayed))


def episodes_needed(episodes: int, share: float, confidence: float, differing: int = 1) -> int:
    """Return the smallest number of replayed episodes with which `detection_probability` is at least `confidence` if
    the share `share` of the episodes is falsified.

    For many episodes and `differing` = 1 it approaches log(1 - confidence) / log(1 - share). If even a replay of all
    episodes does not have that probability, the result is `episodes`.

    Example:
        >>> episodes_needed(10_000, share=0.05, confidence=0.99)
        90
    """
    falsified, wanted = ceil(Fraction(str(share)) * episodes), Fraction(str(confidence))
    high = 1
    while high < episodes and detection_probability(episodes, falsified, high, differing) < wanted:
        high *= 2
    low, high = high // 2, min(high, episodes)
    while low + 1 < high:
        middle = (low + high) // 2
        enough = detection_probability(episodes, falsified, middle, differing) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def sign_test(first: int, second: int) -> float:
    """Return the two-sided p-value of the exact sign test: n = `first` + `second` differences, of which each is equally
    likely to be of the first or the second kind.

        min(1, 2 sum over i <= min(first, second) of C(n, i) / 2^n)

    Example:
        >>> sign_test(8, 0)
        0.0078125
    """
    number = first + second
    tail = sum(comb(number, i) for i in range(min(first, second) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**number)))


def differences_needed(confidence: float) -> int:
    """Return the smallest number of differences, all of one kind, whose `sign_test` is at most 1 - `confidence`.

    Example:
        >>> differences_needed(0.99)
        8
    """
    number, largest = 1, 1 - Fraction(str(confidence))
    while Fraction(2, 2**number) > largest:
        number += 1
    return number


def obstacles_to_bits(claimed: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the names of the versions because of which a replay here may give other bits than the versions `claimed`.

    On CPU, with the same versions and processor, there are none. An unknown commit agrees with every commit. Names that
    are unknown here are not repeated, because a stranger may have chosen them.

    Example:
        >>> obstacles_to_bits({"torch": "2.12", "device": "cpu"}, {"torch": "2.13", "device": "cpu"})
        ['torch']
    """
    unknown = {COMMIT} if "" in (claimed.get(COMMIT, ""), here.get(COMMIT, "")) else set[str]()
    other = {name for name in here.keys() - unknown if claimed.get(name) != here[name]}
    other |= {"unknown versions"} if claimed.keys() - here.keys() else set()
    return sorted(other | ({"device"} if here["device"] != "cpu" else set()))


def choose(episodes: Sequence[ClaimT], number: int, seed: int) -> list[ClaimT]:
    """Return `number` random episodes that the bundle claims to have been finished."""
    finished = [each for each in episodes if each.finished]
    return Random(seed).sample(finished, min(number, len(finished)))


@dataclass(frozen=True)
class Agreement:
    """Comparison of claimed and replayed episodes.

    `compared` is their number, and `different` the names of those that differ in any bit. `only_claimed` and
    `only_replayed` are the numbers of episodes that are solved in the claim or in the replay alone, and `p` is the
    p-value of `sign_test` for these.
    """

    compared: int
    different: tuple[str, ...]
    only_claimed: int
    only_replayed: int

    @property
    def p(self) -> float:
        """P-value under the hypothesis that claims and replays come from the same policy."""
        return sign_test(self.only_claimed, self.only_replayed)


def compare(claimed: Sequence[ClaimT], replayed: Sequence[ClaimT]) -> Agreement:
    """Compare episodes by their name. Episodes whose replay failed are left out."""
    here = {each.name: each for each in replayed if each.finished}
    pairs = [(each, here[each.name]) for each in claimed if each.name in here]
    return Agreement(
        len(pairs),
        tuple(sorted(claim.name for claim, again in pairs if claim != again)),
        sum(claim.solved and not again.solved for claim, again in pairs),
        sum(again.solved and not claim.solved for claim, again in pairs),
    )
