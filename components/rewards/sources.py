"""What the grades of a reward depend on besides its settings."""

from __future__ import annotations

from armature.components.rewards import REWARDS
from armature.components.rewards.reward import Reward
from armature.components.rewards.settings import NamedReward
from armature.components.sources.code import code_digest


def sources_of(own: NamedReward) -> dict[str, str]:
    """Digests and versions by name, of a reward with its own settings.

    Raises:
        ConfigurationError: something that it names is not there.
    """
    kind: type[Reward[NamedReward]] = REWARDS[own.name]
    return {"code": code_digest(kind.__module__), **kind.sources(own)}
