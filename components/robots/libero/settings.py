"""Settings of LIBERO's simulator, of perturbations and of demonstrations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from armature.components.contracts.settings import Settings
from armature.components.robots.datasets.settings import LayoutSettings
from armature.components.robots.libero.pro import ProSuite

# --- Simulation and rendering ---

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]


IMAGES = "observation.images."
"""Prefix of a camera's name in observations and datasets."""


class SimulatorSettings(Settings):
    """Settings of the simulator, shared by demonstrations and evaluation: a policy must see what it was trained on."""

    camera_name_mapping: dict[str, str] = Field(
        {"agentview": "image", "robot0_eye_in_hand": "wrist_image"}, min_length=1
    )
    """Names of cameras in datasets, after the prefix observation.images., by name in the simulator: agentview =
    image."""
    resolution: int = Field(256, ge=2, le=4096)
    """Height and width of the square images, in pixels."""
    control_freq: PositiveInt = 20
    """Actions per second; LIBERO's datasets have 20."""
    num_steps_wait: NonNegativeInt = 50
    """Steps without motion after a reset, because the objects of stored initial states have not come to rest yet.
    LeRobot waits 10 steps; published results of MolmoAct2 wait 50."""
    reflections: bool = True
    """Render reflections on floors and tables, as in LIBERO's datasets. This takes most of the rendering time."""
    offscreen_samples: NonNegativeInt = 4
    """Samples per pixel (anti-aliasing)."""
    assets: Literal["compact"] | None = None
    """compact: simple shapes of one color each instead of LIBERO's meshes and textures, for machines that cannot
    download these. Motions are the same, images differ. Available for libero_spatial, libero_object and libero_goal."""
    reach_distance: PositiveFloat | None = None
    """Simplifies tasks: a task is solved as soon as the gripper is within this distance in meters of the origin of the
    task's object, in demonstrations too; none: the task's own goal. Tasks whose first goal is about a drawer, a door or
    a knob cannot be simplified."""
    trusted_initial_states: tuple[str, ...] = ()
    """SHA-256 digests of further files of initial states that may be loaded, besides the files of the package."""

    @field_validator("camera_name_mapping")
    @classmethod
    def _plain_names(cls, mapping: dict[str, str]) -> dict[str, str]:
        """Also accept the names that LeRobot uses, with the suffix of the simulator's observations: agentview_image."""
        plain = {camera.removesuffix("_image"): name for camera, name in mapping.items()}
        if len(set(plain.values())) < len(mapping):
            raise ValueError(f"two cameras have the same name: {mapping}")
        if wrong := [name for name in plain.values() if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)]:
            raise ValueError(f"{wrong[0]!r} cannot be the name of a camera: use letters, digits, _, . and -")
        return plain


# --- Perturbations of an evaluation and their strengths ---

Strength = Annotated[float, Field(ge=0.0, le=1.0)]
Strengths = tuple[Strength, ...]


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Kind of a perturbation, a field of `PerturbationSettings`, and its strength from 0 (no change) to 1."""

    name: str
    strength: float

    @property
    def label(self) -> str:
        """Name in result tables, for example camera/0.5."""
        return f"{self.name}/{self.strength:g}"


class PerturbationSettings(Settings):
    """Strengths of each kind of perturbation, from 0 (no change) to 1. Every planned episode is repeated with each."""

    camera: Strengths = ()
    """Every camera is rotated around the point it looks at by up to 20° sideways and 10° up or down, moved closer or
    farther by up to 15 % and rolled by up to 5°; its field of view changes by up to 15 %."""
    light: Strengths = ()
    """Lights are moved by up to 1.5 m and rotated by up to 30°, become up to 2.5 times brighter or darker and change
    their color by up to 30 %; ambient light is added."""
    texture: Strengths = ()
    """Table, floor, walls and background are blended with random patterns and colors; at 1 only these are visible."""
    layout: Strengths = ()
    """Every object that stands freely is moved by up to 5 cm and rotated by up to 30°, together with objects on top of
    it. An object without a free place to move to stays."""
    distractors: Strengths = ()
    """Like layout, but only for objects that the task is not about, and up to 10 cm."""
    robot: Strengths = ()
    """Each joint of the arm starts up to 0.15 rad away from its initial position, without touching anything."""
    language: Strengths = ()
    """The instruction is paraphrased. Up to 1/3: other verbs. Up to 2/3: also phrased as a request. Above: also split
    into steps and preceded by a sentence about the scene."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for name in type(self).model_fields:
            strengths = getattr(self, name)
            if len({Perturbation(name, each).label for each in strengths}) < len(strengths):
                raise ValueError(f"{name}: {', '.join(map(str, strengths))}: list each strength once")
        return self

    def listed(self) -> list[Perturbation]:
        """Return all perturbations, by kind in the order of the fields and by strength as listed."""
        return [Perturbation(name, float(one)) for name in type(self).model_fields for one in getattr(self, name)]


# --- Demonstrations and their recording ---


class DemonstrationSettings(Settings):
    """Settings of demonstrations. The episodes of a task start from the suite's stored initial states, in order."""

    model_config = ConfigDict(title="Demonstrations")

    suite: Suite | ProSuite
    """LIBERO suite, or its variant in LIBERO-PRO, whose tasks are demonstrated."""
    tasks: tuple[NonNegativeInt, ...] = ()
    """Numbers of the tasks in the suite; empty: all tasks that the scripted policy supports."""
    episodes_per_task: PositiveInt = 50
    """Episodes of each task. After the 50 stored states, the first is used again."""
    first_initial_state: NonNegativeInt = 0
    """Initial state of the first episode. Use other states for evaluation."""
    seed: NonNegativeInt = 0
    """Seed of the positions of fixtures and of the noise."""
    noise: NonNegativeFloat = 0.1
    """Standard deviation of the noise added to the scripted policy's motions, where 1 is the largest motion; 0: no
    noise. The recorded actions are those without noise, so that a policy learns to recover."""
    storage: Literal["image", "video"] = "video"
    """Storage of images: as PNG in the data files (image), or as videos."""


class DemonstrationsStageSettings(Settings):
    """Recipe sections of the stage demonstrations."""

    simulator: SimulatorSettings
    demonstrations: DemonstrationSettings
    layout: LayoutSettings

    @model_validator(mode="after")
    def _videos_are_encoded(self) -> Self:
        if self.demonstrations.storage == "video" and self.layout.video is None:
            raise ValueError("demonstrations.storage = 'video' needs layout.video")
        return self
