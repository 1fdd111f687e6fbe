"""Which perturbations an evaluation adds, and how strong they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from armature.components.contracts.settings import Settings

Strength = Annotated[float, Field(ge=0.0, le=1.0)]
Strengths = tuple[Strength, ...]


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One of `PerturbationSettings`, and its strength from 0, which changes nothing, to 1."""

    name: str
    strength: float

    @property
    def label(self) -> str:
        return f"{self.name}/{self.strength:g}"


class PerturbationSettings(Settings):
    """Each by its strengths, from 0, which changes nothing, to 1; every planned episode is played again with each."""

    camera: Strengths = Field(
        (),
        description="Every camera turns around the point that it looks at, by up to 20° sideways and 10° up or down, "
        "moves nearer or farther by up to 15 % and rolls by up to 5°; its field of view changes by up to 15 %.",
    )
    light: Strengths = Field(
        (),
        description="Lights move by up to 1.5 m and turn by up to 30°, become up to 2.5 times brighter or darker, and "
        "change their color by up to 30 %; ambient light is added.",
    )
    texture: Strengths = Field(
        (),
        description="Table, floor, walls and background fade to random patterns and colors; at 1 nothing of theirs is "
        "left.",
    )
    layout: Strengths = Field(
        (),
        description="Every object that stands freely is moved by up to 5 cm and turned by up to 30°, with what stands "
        "on it. One that finds no free place stays.",
    )
    distractors: Strengths = Field((), description="As layout, only objects that the task is not about; up to 10 cm.")
    robot: Strengths = Field((), description="Each joint of the arm begins up to 0.15 rad elsewhere, touching nothing.")
    language: Strengths = Field(
        (),
        description="The instruction in other words. Up to 1/3: other verbs; up to 2/3: as a request, too; above: in "
        "two steps after a sentence about the scene, too.",
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for name in type(self).model_fields:
            strengths = getattr(self, name)
            if len(set(strengths)) < len(strengths):
                raise ValueError(f"{name}: {', '.join(map(str, strengths))}: name each strength once")
        return self

    def listed(self) -> list[Perturbation]:
        """All, by name as above and by strength as given."""
        return [Perturbation(name, float(one)) for name in type(self).model_fields for one in getattr(self, name)]
