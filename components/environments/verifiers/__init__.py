"""The environment `verifiers`: environments of the package `verifiers`, played turn by turn by our sampler.

A verifiers environment runs its own loop and requests each assistant message from a chat endpoint. We give it an
endpoint on loopback: a request becomes an observation, and the policy's action becomes the answer. So its loop and its
scoring need not be written again here.
"""

from armature.components.environments.verifiers.environment import VerifiersEnvironment, VerifiersSettings

__all__ = ["VerifiersEnvironment", "VerifiersSettings"]
