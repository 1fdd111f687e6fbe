"""Environments behind an OpenEnv server, played over its WebSocket.

The server has packages of its own, which conflict with ours, so it is a process or a machine of its own: nothing of
OpenEnv's is imported. Protocol: the messages `reset`, `step` and `close` of openenv 0.10, openenv.core.env_server.
"""

from armature.components.environments.openenv.environment import OpenEnvEnvironment

__all__ = ["OpenEnvEnvironment"]
