"""Environments of the `verifiers` package, played turn by turn by our own sampler.

A verifiers environment, old or new, runs its own loop and asks a chat endpoint for each assistant message. The
bridge gives it an endpoint on loopback: what it asks becomes an observation, the action becomes the answer. So
neither its loop nor its scoring is written again here.
"""

from armature.components.environments.verifiers.environment import VerifiersEnvironment, VerifiersSettings

__all__ = ["VerifiersEnvironment", "VerifiersSettings"]
