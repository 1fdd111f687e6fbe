"""Configuration of a SmolVLA: the fields of LeRobot's config.json that a model or its processor needs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError, model_validator

from armature.components.contracts.errors import DataError
from armature.components.robots.policies.source import CONFIG, read_json

EMPTY_CAMERA = "observation.images.empty_camera_"
"""Beginning of the names of cameras that LeRobot masks out, so that they have no effect."""


class PolicyFeature(BaseModel):
    """A feature of the policy's inputs or outputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["VISUAL", "STATE", "ACTION", "ENV"]
    shape: tuple[PositiveInt, ...]


class SmolVLAConfig(BaseModel):
    """Content of config.json. Other fields of the file, such as LeRobot's settings of training, are kept.

    A field whose type has a single value is a variant of the model that is not supported.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    flow_matching_time_offset: ClassVar[float] = 0.0
    flow_matching_time_scale: ClassVar[float] = 0.999
    flow_matching_cutoff: ClassVar[float] = 1.0
    flow_matching_beta_alpha: ClassVar[float] = 1.0
    flow_matching_beta_beta: ClassVar[float] = 1.5
    """LeRobot draws 0.001 + 0.999 Beta(1.5, 1), in time from actions to noise. In ours it is 0.999 Beta(1, 1.5)."""

    type: Literal["smolvla"]
    n_obs_steps: Literal[1] = 1
    input_features: dict[str, PolicyFeature] = {}
    output_features: dict[str, PolicyFeature] = {}
    normalization_mapping: dict[str, str] = {}
    chunk_size: PositiveInt = 50
    n_action_steps: PositiveInt = 50
    max_state_dim: PositiveInt = 32
    max_action_dim: PositiveInt = 32
    resize_imgs_with_padding: tuple[PositiveInt, PositiveInt] = (512, 512)
    adapt_to_pi_aloha: Literal[False] = False
    tokenizer_max_length: PositiveInt = 48
    num_steps: PositiveInt = 10
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    add_image_special_tokens: Literal[False] = False
    attention_mode: Literal["cross_attn"] = "cross_attn"
    num_expert_layers: int = -1
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: PositiveFloat = 0.75
    min_period: PositiveFloat = 4e-3
    max_period: PositiveFloat = 4.0

    @model_validator(mode="after")
    def _expert_has_all_layers(self) -> SmolVLAConfig:
        if self.num_expert_layers > 0 and self.num_expert_layers != self.num_vlm_layers:
            raise ValueError("num_expert_layers: an expert with fewer layers than the VLM is not supported")
        return self

    @classmethod
    def load(cls, folder: Path) -> SmolVLAConfig:
        """Read config.json of a checkpoint.

        Raises:
            DataError: the file is missing or invalid, or the model is a variant that is not supported.
        """
        try:
            return cls.model_validate(read_json(folder / CONFIG))
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(
                f"{'.'.join(map(str, first['loc']))}: {first['msg']} (given {first['input']!r:.80})",
                code="smolvla_config_invalid",
                where=str(folder / CONFIG),
                remedy="use a checkpoint of SmolVLA that LeRobot 0.6.1 saved, without its variants for other robots",
            ) from error

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras, in the model's order."""
        images = (name for name, feature in self.input_features.items() if feature.type == "VISUAL")
        return tuple(name for name in images if not name.startswith(EMPTY_CAMERA))

    @property
    def flow_matching_num_steps(self) -> int:
        """Number of denoising steps."""
        return self.num_steps

    def attends_itself(self, layer: int) -> bool:
        """Return True if actions attend to each other in an expert layer; in other layers only to the VLM's tokens."""
        every = self.self_attn_every_n_layers
        return every > 0 and layer % every == 0
