"""Settings of a policy for tests; a test only names the settings that matter to it."""

from __future__ import annotations

from typing import Any

from armature.components.robots.policies.settings import RobotPolicySettings

_PLAIN: dict[str, Any] = {
    "image_attention_at_inference": "as_trained",
    "chunk_size": 10,
    "n_action_steps": 10,
    "num_flow_timesteps": 2,
    "llm_residual_dropout": 0.0,
    "dtype": "float32",
}


def policy_settings(**changes: Any) -> RobotPolicySettings:
    """Return the default settings of a plain policy, with `changes` applied."""
    return RobotPolicySettings.model_validate(_PLAIN | changes)
