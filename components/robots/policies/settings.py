"""Settings of a robot policy: its checkpoint, how it is trained, and how it predicts actions."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from armature.components.contracts.settings import Settings

ActionMode = Literal["continuous", "discrete", "both"]
InferenceMode = Literal["continuous", "discrete"]
Family = Literal["molmoact2", "smolvla"]
Semantics = Literal["head", "0.6.1", "seed"]
Quantization = Literal["fp8"]
OF_MOLMOACT2 = (
    *("action_tokenizer", "action_tokenizer_revision", "norm_tag", "semantics", "image_attention_at_inference"),
    *("action_mode", "setup_type", "control_mode", "normalize_language", "normalize_gripper", "add_setup_tokens"),
    *("add_control_tokens", "max_sequence_length", "mask_action_dim_padding", "enable_knowledge_insulation"),
    *("softmax_auxiliary_loss_scale", "discrete_loss_token_weighting", "llm_residual_dropout"),
)
"""Settings that have no effect on other policies, which so keep their defaults."""
ONLY_MOLMOACT2 = ("packing", "quantization", "inference_action_mode", "image_attention_at_inference")
"""Settings of training and playing that other policies do not support, unless they have these values: none, false,
continuous."""
Normalization = Literal["quantiles", "mean_std", "identity"]
Orientation = Literal["upright", "rotated_180", "mirrored", "upside_down"]
Rotation = Literal["axis_angle", "euler_xyz", "quaternion_xyzw", "quaternion_wxyz", "rotation_6d", "none"]


class TinyPolicySettings(Settings):
    """Sizes of a policy with random weights, in the released layout, small enough for a CPU."""

    seed: NonNegativeInt = Field(0, lt=2**63)
    """Seed of the weights."""
    hidden_size: PositiveInt = 96
    """Width of the language model."""
    intermediate_size: PositiveInt = 192
    """Width of the language model's feed-forward layers."""
    layers: PositiveInt = 2
    """Number of layers of the language model, and of the action expert."""
    heads: PositiveInt = 3
    """Attention heads of the language model."""
    key_value_heads: PositiveInt = 1
    """Key and value heads of the language model."""
    vision_hidden_size: PositiveInt = 64
    """Width of the vision tower."""
    vision_intermediate_size: PositiveInt = 128
    """Width of the vision tower's feed-forward layers."""
    vision_layers: PositiveInt = 2
    """Number of layers of the vision tower."""
    vision_heads: PositiveInt = 2
    """Attention heads of the vision tower."""
    image_side: PositiveInt = 84
    """Side of an image after resizing, in pixels; a multiple of 14, the side of a patch."""
    expert_hidden_size: PositiveInt = 96
    """Width of the action expert."""
    expert_heads: PositiveInt = 3
    """Attention heads of the action expert."""
    expert_mlp_ratio: float = 2.0
    """Width of the action expert's feed-forward layers, as a multiple of `expert_hidden_size`."""
    time_embedding: PositiveInt = 64
    """Width of the embedding of the flow-matching time."""
    max_action_dim: PositiveInt = 8
    """Largest number of dimensions of an action; actions with fewer are padded."""
    max_action_horizon: PositiveInt = 10
    """Largest number of actions in a chunk."""
    max_positions: PositiveInt = 1024
    """Longest sequence in tokens."""
    action_tokens: PositiveInt = 512
    """Number of discrete action tokens; the released model has 2048."""
    corpus: tuple[str, ...] = ()
    """Texts that the byte-level tokenizer is trained on."""
    initializer_range: float = 0.02
    """Standard deviation of the language model's weights."""
    vision_initializer_range: float = 0.02
    """Standard deviation of the vision tower's weights."""

    @property
    def vision_config(self) -> dict[str, int]:
        """Sizes of the vision tower under the names of a configuration."""
        return {
            "hidden_size": self.vision_hidden_size,
            "intermediate_size": self.vision_intermediate_size,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.vision_heads,
        }

    @property
    def text_config(self) -> dict[str, int]:
        """Sizes of the language model under the names of a configuration."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.hidden_size // self.heads,
        }


class RobotConventions(Settings):
    """Conventions of the data that a policy was trained on, or of a simulator.

    No field has a default, because a policy that is wrong about one of them still moves the robot, only badly.
    """

    cameras: tuple[str, ...] = Field(min_length=1)
    """Simulator cameras that the policy sees, in its order: agentview, robot0_eye_in_hand in LIBERO."""
    image_rotation: Orientation | dict[str, Orientation]
    """Orientation of images, of all cameras or of each by its name. upright: as in LIBERO's datasets. rotated_180: as
    robosuite renders them."""
    image_channels: Literal["rgb", "bgr"]
    """Order of color channels."""
    state_dimensions: PositiveInt
    """Number of values of a state."""
    state_rotation: Rotation
    """Form of the end effector's rotation in a state."""
    length_unit: Literal["m", "cm", "mm"]
    """Unit of positions in a state."""
    action_dimensions: PositiveInt
    """Number of values of an action."""
    action_target: Literal["delta_end_effector", "absolute_end_effector", "delta_joints", "absolute_joints"]
    """Meaning of an action: a motion or a target, of the end effector or of the joints."""
    action_rotation: Rotation
    """Form of the end effector's rotation in an action."""
    action_units: Literal["normalized", "physical"]
    """normalized: 1 is the controller's largest motion in a step. physical: meters and radians."""
    gripper_open: float
    """Value of an action's last dimension that opens the gripper."""
    gripper_closed: float
    """Value of an action's last dimension that closes the gripper."""
    control_freq: PositiveInt
    """Actions per second."""

    @field_validator("image_rotation")
    @classmethod
    def _of_each_camera(cls, value: str | dict[str, str], info: ValidationInfo) -> str | dict[str, str]:
        """Return one orientation if all cameras have the same."""
        if isinstance(value, str):
            return value
        if set(value) != set(info.data.get("cameras", value)):
            raise ValueError(f"it names {', '.join(value)}: name each camera of `cameras`")
        return value if len(set(value.values())) > 1 else next(iter(value.values()))


class ExternalPolicySettings(Settings):
    """A policy that another program computes. It can be evaluated, not trained."""

    conventions: RobotConventions
    """Conventions of the data that the policy was trained on. They must be the simulator's."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait in seconds for an answer. The first answer includes compilation in some programs, and the requests
    of `evaluation.rows_per_pass` episodes wait for each other."""


class ServedPolicySettings(ExternalPolicySettings):
    """A policy behind a server of openpi's protocol."""

    url: str = Field(pattern=r"^wss?://[^\s/@?#]+(/[^\s?#]*)?$")
    """Address of the server: ws://127.0.0.1:8000. If it asks for a key, set ARMATURE_POLICY_KEY."""
    weights: str = Field(min_length=1)
    """Name and version of the served weights. Servers do not report theirs, so an evaluation is made again only if this
    name, the address or another setting changes."""
    camera_fields: tuple[str, ...] = ("observation/image", "observation/wrist_image")
    """Fields of an observation that hold the images of conventions.cameras, in the same order. The defaults are those
    of openpi's LIBERO policies."""
    state_field: str = Field("observation/state", min_length=1)
    """Field of an observation that holds the state."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        _ = urlsplit(self.url).port  # raises ValueError if it is not a port's number
        fields = (*self.camera_fields, self.state_field, "prompt", "seed")
        if len(self.camera_fields) != len(self.conventions.cameras) or len(set(fields)) < len(fields):
            raise ValueError(
                f"camera_fields, state_field: {len(self.conventions.cameras)} cameras, the state, prompt and seed need "
                f"a field each, and these are named: {', '.join(fields)}"
            )
        return self


class LeRobotPolicySettings(ExternalPolicySettings):
    """A checkpoint that LeRobot saved, computed by LeRobot in a process of its own environment."""

    path: str = Field(min_length=1)
    """Folder of the checkpoint: outputs/train/act/checkpoints/last/pretrained_model."""


class RobotPolicySettings(Settings):
    """Checkpoint of a robot policy and facts about its robot; the defaults are LeRobot's.

    Example:
        >>> settings = RobotPolicySettings(checkpoint_path="allenai/MolmoAct2-LIBERO", norm_tag="libero")
        >>> settings.action_mode, settings.chunk_size
        ('continuous', 30)
    """

    family: Family = "molmoact2"
    """Architecture of the policy."""
    checkpoint_path: str | None = None
    """Hub name or folder of a checkpoint in the released layout, for example allenai/MolmoAct2. For a SmolVLA in
    `path`: of the VLM, if it is not the one that its config.json names."""
    path: str | None = None
    """Hub name or folder of a checkpoint that LeRobot saved."""
    tiny: TinyPolicySettings | None = None
    """Sizes of a small policy with random weights, made instead of reading a checkpoint."""
    server: ServedPolicySettings | None = None
    """A policy behind a server; all other settings are then left out."""
    lerobot: LeRobotPolicySettings | None = None
    """A policy of LeRobot's, computed by LeRobot; all other settings are then left out."""
    revision: str | None = None
    """Commit of the hub checkpoint; required for hub names."""
    checkpoint_revision: str | None = None
    """Commit of the released checkpoint, or of a SmolVLA's VLM, that the checkpoint in `path` was trained from."""
    action_tokenizer: str | None = None
    """Hub name or folder of the FAST tokenizer for action tokens. The checkpoint's own if it is None."""
    action_tokenizer_revision: str | None = None
    """Commit of the action tokenizer, if it is a hub name."""
    norm_tag: str | None = None
    """Entry of the checkpoint's norm_stats.json to use: its statistics, prompt words, cameras and horizon."""
    semantics: Semantics = "head"
    """LeRobot version whose training is reproduced: head (since pull request 4249), 0.6.1, or seed (the first one)."""
    image_attention_at_inference: Literal["bidirectional", "as_trained"] = "bidirectional"
    """Attention among image tokens at inference. The released code trains causally (continuous, both), but infers
    bidirectionally."""
    action_mode: ActionMode = "continuous"
    """Actions to train: continuous by flow matching, discrete as tokens, or both."""
    chunk_size: PositiveInt = 30
    """Number of actions predicted at once."""
    n_action_steps: PositiveInt = 30
    """Number of a chunk's actions that the robot executes before it asks for the next chunk."""
    setup_type: str = ""
    """Prompt words for robot and scene, for example "single franka robotic arm in libero"."""
    control_mode: str = ""
    """Prompt words for the kind of actions, for example "delta end-effector pose"."""
    image_keys: tuple[str, ...] = ()
    """Cameras in the order in which the model sees them; empty: the dataset's cameras."""
    normalize_language: bool = True
    """Write instructions in lower case, on one line, without closing punctuation."""
    normalize_gripper: bool = False
    """Normalize the gripper's dimension like the others."""
    add_setup_tokens: bool = True
    """Put setup_type between <setup_start> and <setup_end>."""
    add_control_tokens: bool = True
    """Put control_mode between <control_start> and <control_end>."""
    state_normalization: Normalization = "quantiles"
    """Normalization of states."""
    action_normalization: Normalization = "quantiles"
    """Normalization of actions."""
    max_sequence_length: PositiveInt | None = None
    """Largest number of tokens of an example; none: computed from cameras, dimensions and chunk size."""
    num_flow_timesteps: PositiveInt = 8
    """Number of flow-matching times drawn per example."""
    num_inference_steps: PositiveInt | None = None
    """Number of Euler steps at inference; none: the checkpoint's."""
    mask_action_dim_padding: bool = True
    """Leave padded action dimensions out of the flow-matching loss."""
    enable_knowledge_insulation: bool = False
    """Stop the gradient of the flow-matching loss from reaching the VLM."""
    softmax_auxiliary_loss_scale: NonNegativeFloat = 1e-4
    """Weight of the z-loss, logsumexp squared; 0 disables it."""
    discrete_loss_token_weighting: Literal["root_subsegments_root_tokens", "token"] = "root_subsegments_root_tokens"
    """Weight of an action token in the loss: 2 / sqrt(tokens of its example), or 1 (token)."""
    llm_residual_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Dropout after attention and feed-forward of the text layers, in training."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights."""

    @property
    def external(self) -> ServedPolicySettings | LeRobotPolicySettings | None:
        """Settings of a policy that another program computes; None for a policy of our own."""
        return self.server or self.lerobot

    def refuse_unsupported(self, **sections: Settings | None) -> None:
        """Raise ValueError if a section of a recipe asks for what the family does not support."""
        asked = [(name, key, getattr(each, key, None)) for name, each in sections.items() for key in ONLY_MOLMOACT2]
        used = [f"{name}.{key}" for name, key, value in asked if value not in (None, False, "continuous")]
        if self.family != "molmoact2" and used:
            raise ValueError(f"policy.family {self.family} does not support {', '.join(used)}: leave them out")

    @model_validator(mode="after")
    def _family_has_settings(self) -> Self:
        defaults = type(self).model_fields
        changed = [name for name in OF_MOLMOACT2 if getattr(self, name) != defaults[name].default]
        if self.family != "molmoact2" and changed:
            raise ValueError(f"{', '.join(changed)}: no effect on family {self.family}: leave them out")
        return self

    @model_validator(mode="after")
    def _external_alone(self) -> Self:
        settings = self.model_dump(exclude_defaults=True)
        for name in settings.keys() & {"server", "lerobot"}:
            if others := sorted(settings.keys() - {name}):
                raise ValueError(f"{name}: another program has the policy, so {', '.join(others)} would have no effect")
        return self
