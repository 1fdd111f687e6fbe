"""Settings of a policy for tests: a test names what it is about."""

from __future__ import annotations

from typing import Any

from armature.components.policies.settings import RobotPolicySettings

_PLAIN: dict[str, Any] = {
    "semantics": "head",
    "image_attention_at_inference": "as_trained",
    "action_mode": "continuous",
    "chunk_size": 10,
    "n_action_steps": 10,
    "setup_type": "",
    "control_mode": "",
    "image_keys": (),
    "normalize_language": True,
    "normalize_gripper": False,
    "add_setup_tokens": True,
    "add_control_tokens": True,
    "state_normalization": "quantiles",
    "action_normalization": "quantiles",
    "num_flow_timesteps": 2,
    "mask_action_dim_padding": True,
    "enable_knowledge_insulation": False,
    "softmax_auxiliary_loss_scale": 1e-4,
    "discrete_loss_token_weighting": "root_subsegments_root_tokens",
    "llm_residual_dropout": 0.0,
    "dtype": "float32",
}


def policy_settings(**changes: Any) -> RobotPolicySettings:
    """The plain settings with `changes`."""
    return RobotPolicySettings.model_validate(_PLAIN | changes)
