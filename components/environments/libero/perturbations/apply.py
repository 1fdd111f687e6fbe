"""Perturbations by name. What is drawn follows from name, task and seed alone, whatever the strength."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np

from armature.components.environments.libero.perturbations.placement import (
    perturb_distractors,
    perturb_layout,
    perturb_robot,
)
from armature.components.environments.libero.perturbations.scene import PerturbedScene
from armature.components.environments.libero.perturbations.settings import Perturbation
from armature.components.environments.libero.perturbations.sight import perturb_camera, perturb_light, perturb_texture
from armature.components.environments.libero.perturbations.words import paraphrase
from armature.components.environments.libero.tasks import LiberoTask

Perturb = Callable[[PerturbedScene, float, np.random.Generator], None]

SEEN: dict[str, Perturb] = {"camera": perturb_camera, "light": perturb_light, "texture": perturb_texture}
PLACED: dict[str, Perturb] = {
    "layout": perturb_layout,
    "distractors": perturb_distractors,
    "robot": perturb_robot,
}
LANGUAGE = "language"


class Perturber:
    """Changes one episode of LIBERO's environment; without a perturbation, or with a strength of 0, it does nothing."""

    def __init__(self, perturbation: Perturbation | None, task: LiberoTask, seed: int) -> None:
        self._name, self._strength = "", 0.0
        if perturbation is not None and perturbation.strength > 0:
            self._name, self._strength = perturbation.name, perturbation.strength
        parts = [self._name, task.suite, task.index, seed]
        self._rng = np.random.default_rng(int.from_bytes(sha256(json.dumps(parts).encode()).digest()))

    def change_sight(self, environment: Any) -> bool:
        """Of a model that was just compiled, before its state is set; whether anything was to be changed."""
        if self._name not in SEEN:
            return False
        SEEN[self._name](PerturbedScene.of(environment), self._strength, self._rng)
        return True

    def change_places(self, environment: Any) -> bool:
        """Of objects that are at rest; whether something was to be moved, and has to come to rest again."""
        if self._name not in PLACED:
            return False
        PLACED[self._name](PerturbedScene.of(environment), self._strength, self._rng)
        if self._name == "robot":
            controller = environment.robots[0].controller
            controller.update(force=True)
            controller.reset_goal()  # else the hand would turn back
        return True

    def words(self, instruction: str) -> str:
        return paraphrase(instruction, self._strength, self._rng) if self._name == LANGUAGE else instruction
