"""Which robot policy, and how it is trained and asked."""

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
    """Width of its feed-forward layers."""
    layers: PositiveInt = 2
    """Layers of the language model, and of the action expert."""
    heads: PositiveInt = 3
    """Attention heads of the language model."""
    key_value_heads: PositiveInt = 1
    """Key and value heads of the language model."""
    vision_hidden_size: PositiveInt = 64
    """Width of the vision tower."""
    vision_intermediate_size: PositiveInt = 128
    """Width of its feed-forward layers."""
    vision_layers: PositiveInt = 2
    """Layers of the vision tower."""
    vision_heads: PositiveInt = 2
    """Attention heads of the vision tower."""
    image_side: PositiveInt = 84
    """Pixels of a side after resizing; a multiple of the patch of 14."""
    expert_hidden_size: PositiveInt = 96
    """Width of the action expert."""
    expert_heads: PositiveInt = 3
    """Attention heads of the action expert."""
    expert_mlp_ratio: float = 2.0
    """Width of the expert's feed-forward layers over its own."""
    time_embedding: PositiveInt = 64
    """Width of the embedding of the flow-matching time."""
    max_action_dim: PositiveInt = 8
    """Most dimensions of an action; smaller ones are padded."""
    max_action_horizon: PositiveInt = 10
    """Most actions of a chunk."""
    max_positions: PositiveInt = 1024
    """Longest sequence in tokens."""
    action_tokens: PositiveInt = 512
    """Discrete action tokens; the released model has 2048."""
    corpus: tuple[str, ...] = ()
    """Texts that the byte-level tokenizer is trained on."""
    initializer_range: float = 0.02
    """Standard deviation of the language model's weights."""
    vision_initializer_range: float = 0.02
    """Standard deviation of the vision tower's weights."""


class RobotPolicySettings(Settings):
    """Where a policy's weights come from, and what it is told of the robot. The defaults are LeRobot's."""

    checkpoint_path: str | None = None
    """Released layout: hub name or folder (allenai/MolmoAct2)."""
    path: str | None = None
    """A checkpoint that LeRobot saved: hub name or folder."""
    tiny: TinyPolicySettings | None = None
    """Random weights of these sizes instead of a checkpoint."""
    revision: str | None = None
    """Commit of the hub checkpoint; needed for hub names."""
    checkpoint_revision: str | None = None
    """With path: commit of the released checkpoint that it was trained from."""
    action_tokenizer: str | None = None
    """FAST tokenizer for action tokens, hub name or folder; none: the one inside the checkpoint."""
    action_tokenizer_revision: str | None = None
    """Commit of the hub tokenizer."""
    norm_tag: str | None = None
    """Entry of the checkpoint's norm_stats.json: statistics, prompt words, cameras and horizon."""
    semantics: Semantics = "head"
    """Which version's training semantics: LeRobot head, 0.6.1 or the seed's."""
    image_attention_at_inference: Literal["bidirectional", "as_trained"] = "bidirectional"
    """Released code trains causally over images (continuous, both) and infers in both directions."""
    action_mode: ActionMode = "continuous"
    """What is trained: flow matching, action tokens, or both."""
    chunk_size: PositiveInt = 30
    """Actions that are predicted at once."""
    n_action_steps: PositiveInt = 30
    """Actions of a chunk that are carried out before the next."""
    setup_type: str = ""
    """Words for robot and scene: "single franka robotic arm in libero"."""
    control_mode: str = ""
    """Words for the actions: "delta end-effector pose"."""
    image_keys: tuple[str, ...] = ()
    """Cameras in the order the model sees them; empty: the dataset's."""
    normalize_language: bool = True
    """Instructions in lower case, on one line, without closing punctuation."""
    normalize_gripper: bool = False
    """Whether the gripper's dimension is normalized as well."""
    add_setup_tokens: bool = True
    """Whether setup_type stands between tokens of its own."""
    add_control_tokens: bool = True
    """Whether control_mode stands between tokens of its own."""
    state_normalization: Normalization = "quantiles"
    """How states are normalized."""
    action_normalization: Normalization = "quantiles"
    """How actions are normalized."""
    max_sequence_length: PositiveInt | None = None
    """Tokens of an example; none: by its parts."""
    num_flow_timesteps: PositiveInt = 8
    """Flow-matching times drawn per example."""
    num_inference_steps: PositiveInt | None = None
    """Euler steps; none: the checkpoint's own."""
    mask_action_dim_padding: bool = True
    """Leave padded dimensions of actions out of the flow-matching loss."""
    enable_knowledge_insulation: bool = False
    """No gradient from the expert into the VLM."""
    softmax_auxiliary_loss_scale: NonNegativeFloat = 1e-4
    """Weight of logsumexp squared; 0: none."""
    discrete_loss_token_weighting: Literal["root_subsegments_root_tokens", "token"] = "root_subsegments_root_tokens"
    """Weight of an action token: 2 / sqrt(tokens of its example), or 1 each (token)."""
    llm_residual_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Dropout after attention and feed-forward of text layers, in training."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights."""
