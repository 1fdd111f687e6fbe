"""Settings of a robot policy: its checkpoint, how it is trained, and how it predicts actions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from armature.components.contracts.settings import Settings

ActionMode = Literal["continuous", "discrete", "both"]
Semantics = Literal["head", "0.6.1", "seed"]
Quantization = Literal["fp8"]
Normalization = Literal["quantiles", "mean_std", "identity"]


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


class RobotPolicySettings(Settings):
    """Checkpoint of a robot policy and facts about its robot; the defaults are LeRobot's.

    Example:
        >>> settings = RobotPolicySettings(checkpoint_path="allenai/MolmoAct2-LIBERO", norm_tag="libero")
        >>> settings.action_mode, settings.chunk_size
        ('continuous', 30)
    """

    checkpoint_path: str | None = None
    """Hub name or folder of a checkpoint in the released layout, for example allenai/MolmoAct2."""
    path: str | None = None
    """Hub name or folder of a checkpoint that LeRobot saved."""
    tiny: TinyPolicySettings | None = None
    """Sizes of a small policy with random weights, made instead of reading a checkpoint."""
    revision: str | None = None
    """Commit of the hub checkpoint; required for hub names."""
    checkpoint_revision: str | None = None
    """Commit of the released checkpoint that the checkpoint in `path` was trained from."""
    action_tokenizer: str | None = None
    """Hub name or folder of the FAST tokenizer for action tokens. The checkpoint's own if it is None."""
    action_tokenizer_revision: str | None = None
    """Commit of the action tokenizer, if it is a hub name."""
    norm_tag: str | None = None
    """Entry of the checkpoint's norm_stats.json to use: its statistics, prompt words, cameras and horizon."""
    semantics: Semantics = "head"
    """LeRobot version whose training behavior is reproduced: head, 0.6.1 or seed."""
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
