"""MolmoAct2's config.json as typed classes, and how training differs between LeRobot's versions.

transformers writes only the fields that differ from a class's defaults. The defaults below are therefore part of the
file format: they are copied from the released configuration classes and are not the released model's sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
)

from armature.components.contracts.errors import DataError
from armature.components.contracts.files import bare_name
from armature.components.robots.policies.settings import ActionMode, Semantics

if TYPE_CHECKING:
    from transformers import Molmo2Config


Size = Annotated[int, Field(gt=0, le=2**20)]
"""Size of one dimension of a tensor, limited so that the product of three sizes still fits into 64 bits."""
Depth = Annotated[int, Field(gt=0, le=1024)]
"""Number of layers."""


class _Section(BaseModel):
    """Base class of a section of config.json. Fields that the class does not declare are kept, and written back."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class VitConfig(_Section):
    """Configuration of the vision tower."""

    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    num_hidden_layers: Depth = 27
    num_attention_heads: Size = 16
    num_key_value_heads: Size = 16
    head_dim: Size = 72
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: PositiveFloat = 1e-6
    image_default_input_size: tuple[Size, Size] = (378, 378)
    image_patch_size: Size = 14
    image_num_pos: Size = 577
    attention_dropout: NonNegativeFloat = 0.0
    initializer_range: PositiveFloat = 0.02


class AdapterConfig(_Section):
    """Configuration of the image pooling and the projector into the language model."""

    vit_layers: Annotated[tuple[int, ...], Field(min_length=1)] = (-3, -9)
    pooling_attention_mask: bool = False
    hidden_size: Size = 1152
    num_attention_heads: Size = 16
    num_key_value_heads: Size = 16
    head_dim: Size = 72
    attention_dropout: NonNegativeFloat = 0.0
    hidden_act: str = "silu"
    intermediate_size: Size = 18944
    text_hidden_size: Size = 3584
    initializer_range: PositiveFloat = 0.02


class TextConfig(_Section):
    """Configuration of the language model."""

    hidden_size: Size = 3584
    num_attention_heads: Size = 28
    num_key_value_heads: Size = 4
    head_dim: Size = 128
    vocab_size: Size = 152064
    additional_vocab_size: NonNegativeInt = 128
    qkv_bias: bool = True
    num_hidden_layers: Depth = 48
    intermediate_size: Size = 18944
    hidden_act: str = "silu"
    attention_dropout: NonNegativeFloat = 0.0
    residual_dropout: NonNegativeFloat = 0.0
    max_position_embeddings: Size = 4096
    rope_theta: PositiveFloat = 1_000_000.0
    rope_scaling: dict[str, Any] | None = None
    use_qk_norm: bool = False
    qk_norm_type: str = "olmo"
    layer_norm_eps: PositiveFloat = 1e-6
    norm_after: bool = False
    initializer_range: PositiveFloat = 0.02
    tie_word_embeddings: bool = False


class ExpertConfig(_Section):
    """Configuration of the action expert."""

    hidden_size: Size = 1024
    num_layers: Depth = 32
    num_heads: Size = 16
    mlp_ratio: Annotated[float, Field(gt=0, le=1024)] = 8.0 / 3.0
    ffn_multiple_of: Size = 256
    timestep_embed_dim: Size = 256
    dropout: NonNegativeFloat = 0.0
    attn_dropout: NonNegativeFloat = 0.0
    context_layer_norm: bool = True
    qk_norm: bool = True
    qk_norm_eps: PositiveFloat = 1e-6
    rope: bool = True
    causal_attn: bool = False

    @property
    def inner_size(self) -> int:
        """Width of the MLP: hidden_size times mlp_ratio, rounded up to a multiple of ffn_multiple_of."""
        return -(-int(self.hidden_size * self.mlp_ratio) // self.ffn_multiple_of) * self.ffn_multiple_of


class MolmoAct2Config(_Section):
    """Sizes, token ids and flow-matching constants of a checkpoint; a token id that the file lacks is None.

    Example:
        >>> from armature.components.robots.policies.molmoact2.checkpoints.tiny import tiny_config
        >>> from armature.components.robots.policies.settings import TinyPolicySettings
        >>> config = tiny_config(TinyPolicySettings(max_action_dim=7))
        >>> config.max_action_dim, MolmoAct2Config.from_dict(config.to_dict()) == config
        (7, True)
    """

    model_type: str = "molmoact2"
    vit_config: VitConfig = VitConfig()
    adapter_config: AdapterConfig = AdapterConfig()
    text_config: TextConfig = TextConfig()
    action_expert_config: ExpertConfig
    image_start_token_id: int | None = None
    low_res_image_start_token_id: int | None = None
    image_end_token_id: int | None = None
    image_low_res_id: int | None = None
    image_patch_id: int
    image_col_id: int | None = None
    frame_start_token_id: int | None = None
    frame_end_token_id: int | None = None
    action_output_token_id: int | None = None
    action_start_token_id: int
    action_end_token_id: int
    action_token_start_id: int
    num_action_tokens: NonNegativeInt = 0
    state_start_token_id: int | None = None
    state_end_token_id: int | None = None
    state_token_start_id: int | None = None
    num_state_tokens: NonNegativeInt = 0
    bos_token_id: int | None = None
    eos_token_id: int
    pad_token_id: int | None = None
    max_action_dim: Size = 32
    max_action_horizon: Size = 30
    n_obs_steps: Size = 30
    action_mode: str = "both"
    state_format: str = "discrete"
    flow_matching_num_steps: Size = 10
    flow_matching_cutoff: float = 1.0
    flow_matching_time_offset: float = 0.001
    flow_matching_time_scale: float = 0.999
    flow_matching_beta_alpha: float = 1.0
    flow_matching_beta_beta: float = 1.5
    mask_action_dim_padding: bool = True
    enable_depth_reasoning: bool = False
    action_expert_depth_gate: bool = False
    add_setup_tokens: bool = True
    add_control_tokens: bool = True
    initializer_range: float = 0.02
    norm_stats_filename: str = "norm_stats.json"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> MolmoAct2Config:
        """Validate the parsed JSON of a config.json; errors name the file as `where`.

        Raises:
            DataError: a field is missing or invalid, or asks for an architecture that no released policy has.
        """
        if "action_horizon" in raw and "max_action_horizon" not in raw:
            raise DataError(
                "the configuration is outdated: it has action_horizon instead of max_action_horizon",
                code="policy_config_outdated",
                where=where,
                remedy="use a newer export of the checkpoint",
            )
        try:
            config = cls.model_validate(dict(raw))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise DataError(
                f"{field}: {first['msg']}",
                code="invalid_policy_config",
                where=where,
                remedy="use the checkpoint's own file",
            ) from error
        config._check(where)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json: exactly the fields that `from_dict` received, undeclared ones included."""
        return self.model_dump(mode="json", exclude_unset=True)

    def molmo2(self) -> Molmo2Config:
        """Return the configuration of transformers' Molmo2 for the VLM inside.

        It has only the vision layers up to the last one whose output is used, and numbers those layers from 0.
        """
        from transformers import Molmo2Config

        vit, adapter, text = self.vit_config, self.adapter_config, self.text_config
        features = [layer % vit.num_hidden_layers for layer in adapter.vit_layers]
        heads = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "attention_dropout")
        sizes = (*heads, "hidden_size", "intermediate_size", "initializer_range")
        return Molmo2Config(
            vision_config={name: getattr(vit, name) for name in sizes}
            | {
                "num_hidden_layers": max(features) + 1,
                "image_size": list(vit.image_default_input_size),
                "patch_size": vit.image_patch_size,
                "num_position_embeddings": vit.image_num_pos,
                "layer_norm_eps": vit.layer_norm_eps,
            },
            adapter_config={name: getattr(adapter, name) for name in sizes}
            | {"vision_feature_layer": features, "text_hidden_size": adapter.text_hidden_size},
            text_config={name: getattr(text, name) for name in sizes}
            | {
                "vocab_size": text.vocab_size,
                "additional_vocab_size": text.additional_vocab_size,
                "num_hidden_layers": text.num_hidden_layers,
                "attention_bias": text.qkv_bias,
                "max_position_embeddings": text.max_position_embeddings,
                "rope_parameters": {"rope_type": "default", "rope_theta": text.rope_theta},
                "qk_norm_type": text.qk_norm_type,
                "rms_norm_eps": text.layer_norm_eps,
                "norm_after": text.norm_after,
            },
            image_patch_id=self.image_patch_id,
            initializer_range=self.initializer_range,
            tie_word_embeddings=text.tie_word_embeddings,
        )

    def _check(self, where: str) -> None:
        """Raise DataError unless the architecture is the one that `MolmoAct2` implements."""
        text, expert, adapter = self.text_config, self.action_expert_config, self.adapter_config
        needed: tuple[tuple[str, Any, Any], ...] = (
            ("model_type", self.model_type, "molmoact2"),
            ("state_format", self.state_format, "discrete"),
            ("enable_depth_reasoning", self.enable_depth_reasoning, False),
            ("action_expert_depth_gate", self.action_expert_depth_gate, False),
            ("text_config.qk_norm_type", text.qk_norm_type if text.use_qk_norm else None, "qwen3"),
            ("text_config.norm_after", text.norm_after, False),
            ("text_config.rope_scaling", text.rope_scaling, None),
            ("text_config.tie_word_embeddings", text.tie_word_embeddings, False),
            ("adapter_config.pooling_attention_mask", adapter.pooling_attention_mask, True),
            ("action_expert_config.num_layers", expert.num_layers, text.num_hidden_layers),
            ("action_expert_config.causal_attn", expert.causal_attn, False),
            ("action_expert_config.qk_norm", expert.qk_norm, True),
            ("action_expert_config.qk_norm_eps", expert.qk_norm_eps, 1e-6),
            ("action_expert_config.context_layer_norm", expert.context_layer_norm, True),
            ("action_expert_config.rope", expert.rope, True),
            ("action_expert_config.dropout", expert.dropout, 0.0),
            ("action_expert_config.attn_dropout", expert.attn_dropout, 0.0),
        )
        if not bare_name(self.norm_stats_filename, f"{where}: norm_stats_filename").endswith("stats.json"):
            raise DataError(
                f"norm_stats_filename is {self.norm_stats_filename!r}",
                code="invalid_statistics_name",
                where=where,
                remedy="name the statistics norm_stats.json, or <something>stats.json",
            )
        for field, value, supported in needed:
            if value != supported:
                raise DataError(
                    f"{field} is {value!r}, but only {supported!r} is supported",
                    code="architecture_unsupported",
                    where=where,
                    remedy="use a regular MolmoAct2 checkpoint (not Think, whose depth reasoning is not implemented)",
                )


# --- Differences in training between the three published versions ---
#
# They are commits of LeRobot: head c13d79e6 (2026-08-21, pull request 4249), 0.6.1 the release, seed 24017e96
# (2026-05-27, pull request 3604).
#
# Not reproduced: in seed and 0.6.1, padding on the right counted as context of the action expert, so an example's loss
# depended on the lengths of its neighbors in the batch. Here padding is never context.


@dataclass(frozen=True)
class TrainingSemantics:
    """Training behavior of one version of LeRobot's MolmoAct2 policy.

    bidirectional_images: action modes in which image tokens of an example attend to each other in both directions.
    hides_answers: action modes in which the action expert does not attend to the discrete actions (start and end tokens
        included) nor to EOS. BOS and the end of the user's turn are the same token as EOS, so they are hidden too.
    supervises_past_end: train on the padded actions beyond an episode's end, which repeat the last action.
    pad_side: the side on which rows of a batch are padded.
    """

    bidirectional_images: frozenset[ActionMode]
    hides_answers: frozenset[ActionMode]
    supervises_past_end: bool
    pad_side: Literal["left", "right"]


_ALL: frozenset[ActionMode] = frozenset({"continuous", "discrete", "both"})
_UP_TO_0_6_1 = TrainingSemantics(_ALL, _ALL, supervises_past_end=False, pad_side="right")
SEMANTICS: dict[Semantics, TrainingSemantics] = {
    "head": TrainingSemantics(frozenset({"discrete"}), frozenset({"both"}), supervises_past_end=True, pad_side="left"),
    "0.6.1": _UP_TO_0_6_1,
    "seed": _UP_TO_0_6_1,
}
