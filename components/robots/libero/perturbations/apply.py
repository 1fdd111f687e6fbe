"""Applying perturbations. Random draws depend only on the perturbation's kind, the task and the seed, not on the
strength."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np

from armature.components.robots.libero.perturbations.scene import (
    PerturbedScene,
    perturb_camera,
    perturb_distractors,
    perturb_layout,
    perturb_light,
    perturb_robot,
    perturb_texture,
)
from armature.components.robots.libero.settings import Perturbation
from armature.components.robots.libero.tasks import LiberoTask

# --- Paraphrases of instructions from templates; the task stays the same ---

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
    """Return the instruction in other words.

    Up to strength 1/3 verbs are replaced; up to 2/3 it also becomes a request; above, it is also split into steps and
    preceded by a sentence about the scene. The same generator chooses the same words at every strength. 0 changes
    nothing.

    Example:
        >>> paraphrase("close the drawer", 0.2, np.random.default_rng(0))
        'shut the drawer'
    """
    if strength <= 0:
        return instruction
    chances = {name: options[rng.integers(len(options))] for name, options in SYNONYMS.items()}
    request, scene = REQUESTS[rng.integers(len(REQUESTS))], SCENES[rng.integers(len(SCENES))]
    in_steps = _STEPS.sub(r"first \1, then \2", instruction) if strength > 2 / 3 else instruction
    words = _PHRASE.sub(lambda match: chances[match[0]], in_steps)
    if strength > 1 / 3:
        words = request.format(words)
    return f"{scene}: {words}" if strength > 2 / 3 else words


Perturb = Callable[[PerturbedScene, float, np.random.Generator], None]

SEEN: dict[str, Perturb] = {"camera": perturb_camera, "light": perturb_light, "texture": perturb_texture}
PLACED: dict[str, Perturb] = {
    "layout": perturb_layout,
    "distractors": perturb_distractors,
    "robot": perturb_robot,
}
LANGUAGE = "language"


class Perturber:
    """Perturbs one episode of LIBERO's environment. Without a perturbation, or with strength 0, it does nothing."""

    def __init__(self, perturbation: Perturbation | None, task: LiberoTask, seed: int) -> None:
        self._name, self._strength = "", 0.0
        if perturbation is not None and perturbation.strength > 0:
            self._name, self._strength = perturbation.name, perturbation.strength
        parts = [self._name, task.suite, task.index, seed]
        self._rng = np.random.default_rng(int.from_bytes(sha256(json.dumps(parts).encode()).digest()))

    def change_sight(self, environment: Any) -> bool:
        """Apply the episode's perturbation if it changes cameras, lights or textures. Return True if it does.

        Call this when a reset has created a new model, before the model's state is set.
        """
        if self._name not in SEEN:
            return False
        SEEN[self._name](PerturbedScene.of(environment), self._strength, self._rng)
        return True

    def change_places(self, environment: Any) -> bool:
        """Apply the episode's perturbation if it changes positions of objects or of the arm. Return True if it does.

        Call this when the objects have come to rest. After True, let them come to rest again.
        """
        if self._name not in PLACED:
            return False
        PLACED[self._name](PerturbedScene.of(environment), self._strength, self._rng)
        if self._name == "robot":
            controller = environment.robots[0].controller
            controller.update(force=True)
            controller.reset_goal()  # otherwise the gripper would move back to its old pose
        return True

    def words(self, instruction: str) -> str:
        """Return the instruction. It is paraphrased if the episode's perturbation is of the language."""
        return paraphrase(instruction, self._strength, self._rng) if self._name == LANGUAGE else instruction
