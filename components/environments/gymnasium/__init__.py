"""The environment `gymnasium`: any environment that is registered with Gymnasium, by its id."""

from armature.components.environments.gymnasium.environment import GymnasiumEnvironment

__all__ = ["GymnasiumEnvironment"]
