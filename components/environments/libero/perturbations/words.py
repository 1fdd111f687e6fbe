"""Instructions in other words, by templates: what is to be done stays the same."""

from __future__ import annotations

import re

import numpy as np

SYNONYMS = {
    "pick up": ("grab", "take", "lift up", "grasp"),
    "put": ("place", "set"),
    "place": ("put", "set"),
    "open": ("pull open",),
    "close": ("shut",),
    "push": ("shove", "slide"),
    "turn on": ("switch on",),
    "turn off": ("switch off",),
    "stack": ("pile",),
    "next to": ("beside",),
}
REQUESTS = ("please {}", "could you {}", "your task is to {}", "I need you to {}", "{}, please", "now {}")
SCENES = (
    "there are several things in front of you",
    "you are a robot with one arm",
    "look at the scene carefully",
    "take the time that you need",
)
_PHRASE = re.compile(rf"\b({'|'.join(sorted(SYNONYMS, key=len, reverse=True))})\b")
_VERBS = "|".join(name for name in SYNONYMS if name != "next to")
_STEPS = re.compile(rf"^(.+) and ((?:{_VERBS})\b.+)$")


def paraphrase(instruction: str, strength: float, rng: np.random.Generator) -> str:
    """Up to a strength of 1/3 with other verbs, up to 2/3 as a request, too, above also in steps and after a sentence
    about the scene. The same generator chooses the same words at every strength; 0 changes nothing."""
    if strength <= 0:
        return instruction
    chances = {name: options[rng.integers(len(options))] for name, options in SYNONYMS.items()}
    request, scene = REQUESTS[rng.integers(len(REQUESTS))], SCENES[rng.integers(len(SCENES))]
    in_steps = _STEPS.sub(r"first \1, then \2", instruction) if strength > 2 / 3 else instruction
    words = _PHRASE.sub(lambda found: chances[found[0]], in_steps)
    if strength > 1 / 3:
        words = request.format(words)
    return f"{scene}: {words}" if strength > 2 / 3 else words
