"""What goes wrong between us and AI2-THOR's player."""

from __future__ import annotations

from armature.components.contracts.errors import ArmatureError


class PlayerError(ArmatureError):
    """The player died, did not answer in time, answered what it may not, or refused an action.

    Its episode ends as a failed one; the player is replaced.
    """

    code = "player_failed"
