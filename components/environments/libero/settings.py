"""How LIBERO is simulated and drawn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from armature.components.contracts.settings import Settings

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]


IMAGES = "observation.images."
"""Before the name of a camera, in observations and datasets."""


class SimulatorSettings(Settings):
    """One section for demonstrations and for evaluation: a policy must see what it was trained on."""

    camera_name_mapping: dict[str, str] = Field(
        {"agentview": "image", "robot0_eye_in_hand": "wrist_image"},
        min_length=1,
        description="Camera of the simulator to its name in a dataset, after observation.images: agentview = image.",
    )
    resolution: PositiveInt = Field(256, description="Pixels of a side of the square images.")
    control_freq: PositiveInt = Field(20, description="Actions per second, which LIBERO's data have 20 of.")
    num_steps_wait: NonNegativeInt = Field(
        50,
        description="Steps without motion after a reset. Initial states were stored before their objects had come to "
        "rest; LeRobot waits 10, published results of MolmoAct2 wait 50.",
    )
    reflections: bool = Field(
        True, description="Floors and tables mirror, as in LIBERO's data; most of the drawing time."
    )
    offscreen_samples: NonNegativeInt = Field(4, description="Samples per pixel (anti-aliasing).")
    assets: Literal["compact"] | None = Field(
        None,
        description="compact: shapes of one color each instead of LIBERO's meshes and textures, for machines that "
        "cannot fetch those. Motions are the same, images are not. For libero_spatial, libero_object, libero_goal.",
    )
    reach_distance: PositiveFloat | None = Field(
        None,
        description="An easier task: solved as soon as the gripper is this near the object that the task is about, in "
        "meters from its origin, for demonstrations, too; none: the task's own goal. Tasks that begin with a drawer, a "
        "door or a knob cannot be made easier.",
    )
    trusted_initial_states: tuple[str, ...] = Field(
        (), description="SHA-256 of files of initial states that are loaded although the package never had them."
    )

    @field_validator("camera_name_mapping")
    @classmethod
    def _plain_names(cls, mapping: dict[str, str]) -> dict[str, str]:
        """LeRobot writes the cameras as the simulator's observations: agentview_image."""
        plain = {camera.removesuffix("_image"): name for camera, name in mapping.items()}
        if len(set(plain.values())) < len(mapping):
            raise ValueError(f"two cameras have one name: {mapping}")
        return plain
