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

    seed: NonNegativeInt = Field(0, lt=2**63, description="Seed of the weights.")
    hidden_size: PositiveInt = Field(96, description="Width of the language model.")
    intermediate_size: PositiveInt = Field(192, description="Width of its feed-forward layers.")
    layers: PositiveInt = Field(2, description="Layers of the language model, and of the action expert.")
    heads: PositiveInt = Field(3, description="Attention heads of the language model.")
    key_value_heads: PositiveInt = Field(1, description="Key and value heads of the language model.")
    vision_hidden_size: PositiveInt = Field(64, description="Width of the vision tower.")
    vision_intermediate_size: PositiveInt = Field(128, description="Width of its feed-forward layers.")
    vision_layers: PositiveInt = Field(2, description="Layers of the vision tower.")
    vision_heads: PositiveInt = Field(2, description="Attention heads of the vision tower.")
    image_side: PositiveInt = Field(84, description="Pixels of a side after resizing; a multiple of the patch of 14.")
    expert_hidden_size: PositiveInt = Field(96, description="Width of the action expert.")
    expert_heads: PositiveInt = Field(3, description="Attention heads of the action expert.")
    expert_mlp_ratio: float = Field(2.0, description="Width of the expert's feed-forward layers over its own.")
    time_embedding: PositiveInt = Field(64, description="Width of the embedding of the flow-matching time.")
    max_action_dim: PositiveInt = Field(8, description="Most dimensions of an action; smaller ones are padded.")
    max_action_horizon: PositiveInt = Field(10, description="Most actions of a chunk.")
    max_positions: PositiveInt = Field(1024, description="Longest sequence in tokens.")
    action_tokens: PositiveInt = Field(512, description="Discrete action tokens; the released model has 2048.")
    corpus: tuple[str, ...] = Field((), description="Texts that the byte-level tokenizer is trained on.")
    initializer_range: float = Field(0.02, description="Standard deviation of the language model's weights.")
    vision_initializer_range: float = Field(0.02, description="Standard deviation of the vision tower's weights.")


class RobotPolicySettings(Settings):
    """Where a policy's weights come from, and what it is told of the robot. The defaults are LeRobot's."""

    checkpoint_path: str | None = Field(None, description="Released layout: hub name or folder (allenai/MolmoAct2).")
    path: str | None = Field(None, description="A checkpoint that LeRobot saved: hub name or folder.")
    tiny: TinyPolicySettings | None = Field(None, description="Random weights of these sizes instead of a checkpoint.")
    revision: str | None = Field(None, description="Commit of the hub checkpoint; needed for hub names.")
    checkpoint_revision: str | None = Field(
        None, description="With path: commit of the released checkpoint that it was trained from."
    )
    action_tokenizer: str | None = Field(
        None, description="FAST tokenizer for action tokens, hub name or folder; none: the one inside the checkpoint."
    )
    action_tokenizer_revision: str | None = Field(None, description="Commit of the hub tokenizer.")
    norm_tag: str | None = Field(
        None, description="Entry of the checkpoint's norm_stats.json: statistics, prompt words, cameras and horizon."
    )
    semantics: Semantics = Field(
        "head", description="Which version's training semantics: LeRobot head, 0.6.1 or the seed's."
    )
    image_attention_at_inference: Literal["bidirectional", "as_trained"] = Field(
        "bidirectional",
        description="Released code trains causally over images (continuous, both) and infers in both directions.",
    )
    action_mode: ActionMode = Field("continuous", description="What is trained: flow matching, action tokens, or both.")
    chunk_size: PositiveInt = Field(30, description="Actions that are predicted at once.")
    n_action_steps: PositiveInt = Field(30, description="Actions of a chunk that are carried out before the next.")
    setup_type: str = Field("", description='Words for robot and scene: "single franka robotic arm in libero".')
    control_mode: str = Field("", description='Words for the actions: "delta end-effector pose".')
    image_keys: tuple[str, ...] = Field(
        (), description="Cameras in the order the model sees them; empty: the dataset's."
    )
    normalize_language: bool = Field(
        True, description="Instructions in lower case, on one line, without closing punctuation."
    )
    normalize_gripper: bool = Field(False, description="Whether the gripper's dimension is normalized as well.")
    add_setup_tokens: bool = Field(True, description="Whether setup_type stands between tokens of its own.")
    add_control_tokens: bool = Field(True, description="Whether control_mode stands between tokens of its own.")
    state_normalization: Normalization = Field("quantiles", description="How states are normalized.")
    action_normalization: Normalization = Field("quantiles", description="How actions are normalized.")
    max_sequence_length: PositiveInt | None = Field(None, description="Tokens of an example; none: by its parts.")
    num_flow_timesteps: PositiveInt = Field(8, description="Flow-matching times drawn per example.")
    num_inference_steps: PositiveInt | None = Field(None, description="Euler steps; none: the checkpoint's own.")
    mask_action_dim_padding: bool = Field(
        True, description="Leave padded dimensions of actions out of the flow-matching loss."
    )
    enable_knowledge_insulation: bool = Field(False, description="No gradient from the expert into the VLM.")
    softmax_auxiliary_loss_scale: NonNegativeFloat = Field(1e-4, description="Weight of logsumexp squared; 0: none.")
    discrete_loss_token_weighting: Literal["root_subsegments_root_tokens", "token"] = Field(
        "root_subsegments_root_tokens",
        description="Weight of an action token: 2 / sqrt(tokens of its example), or 1 each (token).",
    )
    llm_residual_dropout: float = Field(
        0.1, ge=0.0, lt=1.0, description="Dropout after attention and feed-forward of text layers, in training."
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Data type of the weights.")
