"""The environment `openenv`: episodes on an OpenEnv server, played over its WebSocket.

The server needs packages that conflict with ours. So it runs as a separate process or on another machine, and nothing
of OpenEnv is imported here. Protocol: the messages `reset`, `step` and `close` of openenv 0.10,
openenv.core.env_server.
"""

from armature.components.environments.openenv.environment import OpenEnvEnvironment

__all__ = ["OpenEnvEnvironment"]
