"""A chat endpoint on loopback whose answers come from our policy, for programs that run a loop of their own.

A request becomes an observation, and the policy's answer becomes the response. So an agent program, or the loop of
another library, need not be written again here.
"""

from armature.components.environments.gateway.episode import GatewayEpisode

__all__ = ["GatewayEpisode"]
