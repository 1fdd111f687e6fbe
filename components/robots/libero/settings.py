"""How LIBERO is simulated, perturbed and demonstrated."""

from __future__ import annotations

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

# How LIBERO is simulated and drawn.

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]


IMAGES = "observation.images."
"""Before the name of a camera, in observations and datasets."""


class SimulatorSettings(Settings):
    """One section for demonstrations and for evaluation: a policy must see what it was trained on."""

    camera_name_mapping: dict[str, str] = Field(
        {"agentview": "image", "robot0_eye_in_hand": "wrist_image"}, min_length=1
    )
    """Camera of the simulator to its name in a dataset, after observation.images: agentview = image."""
    resolution: PositiveInt = 256
    """Pixels of a side of the square images."""
    control_freq: PositiveInt = 20
    """Actions per second, which LIBERO's data have 20 of."""
    num_steps_wait: NonNegativeInt = 50
    """Steps without motion after a reset. Initial states were stored before their objects had come to rest; LeRobot
    waits 10, published results of MolmoAct2 wait 50."""
    reflections: bool = True
    """Floors and tables mirror, as in LIBERO's data; most of the drawing time."""
    offscreen_samples: NonNegativeInt = 4
    """Samples per pixel (anti-aliasing)."""
    assets: Literal["compact"] | None = None
    """compact: shapes of one color each instead of LIBERO's meshes and textures, for machines that cannot fetch those.
    Motions are the same, images are not. For libero_spatial, libero_object, libero_goal."""
    reach_distance: PositiveFloat | None = None
    """An easier task: solved as soon as the gripper is this near the object that the task is about, in meters from its
    origin, for demonstrations, too; none: the task's own goal. Tasks that begin with a drawer, a door or a knob cannot
    be made easier."""
    trusted_initial_states: tuple[str, ...] = ()
    """SHA-256 of files of initial states that are loaded although the package never had them."""

    @field_validator("camera_name_mapping")
    @classmethod
    def _plain_names(cls, mapping: dict[str, str]) -> dict[str, str]:
        """LeRobot writes the cameras as the simulator's observations: agentview_image."""
        plain = {camera.removesuffix("_image"): name for camera, name in mapping.items()}
        if len(set(plain.values())) < len(mapping):
            raise ValueError(f"two cameras have one name: {mapping}")
        return plain


# Which perturbations an evaluation adds, and how strong they are.

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

    camera: Strengths = ()
    """Every camera turns around the point that it looks at, by up to 20° sideways and 10° up or down, moves nearer or
    farther by up to 15 % and rolls by up to 5°; its field of view changes by up to 15 %."""
    light: Strengths = ()
    """Lights move by up to 1.5 m and turn by up to 30°, become up to 2.5 times brighter or darker, and change their
    color by up to 30 %; ambient light is added."""
    texture: Strengths = ()
    """Table, floor, walls and background fade to random patterns and colors; at 1 nothing of theirs is left."""
    layout: Strengths = ()
    """Every object that stands freely is moved by up to 5 cm and turned by up to 30°, with what stands on it. One that
    finds no free place stays."""
    distractors: Strengths = ()
    """As layout, only objects that the task is not about; up to 10 cm."""
    robot: Strengths = ()
    """Each joint of the arm begins up to 0.15 rad elsewhere, touching nothing."""
    language: Strengths = ()
    """The instruction in other words. Up to 1/3: other verbs; up to 2/3: as a request, too; above: in two steps after a
    sentence about the scene, too."""

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


# What is demonstrated, and how it is recorded.


class DemonstrationSettings(Settings):
    """Episodes of every task begin at the suite's stored initial states, one after another."""

    model_config = ConfigDict(title="Demonstrations")

    suite: Suite
    """The suite whose tasks are demonstrated."""
    tasks: tuple[NonNegativeInt, ...] = ()
    """Numbers of tasks in the suite; empty: all that the scripted policy can do."""
    episodes_per_task: PositiveInt = 50
    """Episodes of each task; more than the 50 stored states begin again at the first."""
    first_initial_state: NonNegativeInt = 0
    """Initial state of the first episode; keep others for evaluation."""
    seed: NonNegativeInt = 0
    """Seed of the furniture's places and of the noise."""
    noise: NonNegativeFloat = 0.1
    """Standard deviation of what disturbs its motions (of 1, the largest). What is recorded is what the scripted policy
    wanted, so that a policy learns to recover; 0 disturbs nothing."""
    storage: Literal["image", "video"] = "video"
    """Images as PNG in the data files, or as videos."""


class DemonstrationsStageSettings(Settings):
    """The sections that the dataset depends on."""

    simulator: SimulatorSettings
    demonstrations: DemonstrationSettings
    layout: LayoutSettings

    @model_validator(mode="after")
    def _videos_are_encoded(self) -> Self:
        if self.demonstrations.storage == "video" and self.layout.video is None:
            raise ValueError("demonstrations.storage = 'video' needs layout.video")
        return self
