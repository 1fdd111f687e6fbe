"""Instructions in other words, of all tasks of all suites."""

from __future__ import annotations

import re

import numpy as np
import pytest

from armature.components.environments.libero.perturbations.words import SYNONYMS, paraphrase
from armature.components.environments.libero.tasks import MAX_STEPS, suite_tasks
from tests.environments.libero.simulated import needs_libero

pytestmark = needs_libero


@pytest.mark.parametrize("suite", MAX_STEPS)
def test_what_is_to_be_done_stays_in_the_words(suite: str) -> None:
    replaced = re.compile(rf"\b({'|'.join(sorted(SYNONYMS, key=len, reverse=True))})\b")
    for task in suite_tasks(suite):
        for seed in range(3):
            said = [paraphrase(task.language, strength, np.random.default_rng(seed)) for strength in (0, 0.3, 0.6, 1)]
            assert said[0] == task.language
            assert len(set(said)) == 4, said
            kept = [part.strip() for part in replaced.split(task.language)[::2]]
            for words in said[1:3]:
                for part in kept:
                    assert part in words, words
            assert set(" ".join(kept).split()) - {"and"} <= set(re.findall(r"\w+", said[3]))


def test_an_instruction_by_hand() -> None:
    class First(np.random.Generator):
        """Chooses the first of everything."""

        def integers(self, *_: object, **__: object) -> int:  # type: ignore[override]
            return 0

    rng = First(np.random.PCG64(0))
    instruction = "pick up the bowl next to the mug and place it on the stove"
    assert paraphrase(instruction, 1 / 3, rng) == "grab the bowl beside the mug and put it on the stove"
    assert paraphrase(instruction, 2 / 3, rng) == "please grab the bowl beside the mug and put it on the stove"
    assert paraphrase(instruction, 0.7, rng) == (
        "there are several things in front of you: please first grab the bowl beside the mug, then put it on the stove"
    )
    assert paraphrase("put both moka pots on the stove", 0.3, rng) == "place both moka pots on the stove"
