"""Which robot policy, and how it is trained and asked."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from components.contracts.settings import Settings

ActionMode = Literal["continuous", "discrete", "both"]
Semantics = Literal["head", "0.6.1", "seed"]
Normalisation = Literal["quantiles", "mean_std", "identity"]


class TinyPolicySettings(Settings):
    """Sizes of a policy with random weights, in the released layout, small enough for a CPU."""

    seed: NonNegativeInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    key_value_heads: PositiveInt
    vision_hidden_size: PositiveInt
    vision_intermediate_size: PositiveInt
    vision_layers: PositiveInt
    vision_heads: PositiveInt
    image_side: PositiveInt = Field(description="Pixels of a side after resizing; a multiple of the patch of 14.")
    expert_hidden_size: PositiveInt
    expert_heads: PositiveInt
    expert_mlp_ratio: float
    time_embedding: PositiveInt
    max_action_dim: PositiveInt
    max_action_horizon: PositiveInt
    max_positions: PositiveInt
    action_tokens: PositiveInt = Field(description="Discrete action tokens; the released model has 2048.")
    corpus: tuple[str, ...] = Field(description="Texts that the byte-level tokenizer is trained on.")
    initializer_range: float
    vision_initializer_range: float


class PolicySettings(Settings):
    """Where a policy's weights come from, and what it is told of the robot."""

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
    semantics: Semantics = Field(description="Which version's training semantics: LeRobot head, 0.6.1 or the seed's.")
    image_attention_at_inference: Literal["bidirectional", "as_trained"] = Field(
        description="Released code trains causally over images (continuous, both) and infers in both directions."
    )
    action_mode: ActionMode = Field(description="What is trained: flow matching, action tokens, or both.")
    chunk_size: PositiveInt = Field(description="Actions that are predicted at once.")
    n_action_steps: PositiveInt = Field(description="Actions of a chunk that are carried out before the next.")
    setup_type: str = Field(description='Words for robot and scene: "single franka robotic arm in libero".')
    control_mode: str = Field(description='Words for the actions: "delta end-effector pose".')
    image_keys: tuple[str, ...] = Field(description="Cameras in the order the model sees them; empty: the dataset's.")
    normalize_language: bool
    normalize_gripper: bool
    add_setup_tokens: bool
    add_control_tokens: bool
    state_normalization: Normalisation
    action_normalization: Normalisation
    max_sequence_length: PositiveInt | None = Field(None, description="Tokens of an example; none: by its parts.")
    num_flow_timesteps: PositiveInt = Field(description="Flow-matching times drawn per example.")
    num_inference_steps: PositiveInt | None = Field(None, description="Euler steps; none: the checkpoint's own.")
    mask_action_dim_padding: bool
    enable_knowledge_insulation: bool = Field(description="No gradient from the expert into the VLM.")
    softmax_auxiliary_loss_scale: NonNegativeFloat = Field(description="Weight of logsumexp squared; 0: none.")
    discrete_loss_token_weighting: Literal["root_subsegments_root_tokens", "token"]
    llm_residual_dropout: float = Field(ge=0.0, lt=1.0)
    dtype: Literal["float32", "bfloat16"]
