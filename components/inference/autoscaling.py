"""How many servers the requests in flight call for, with patience."""

from __future__ import annotations

import math

from armature.components.contracts.autoscaling import ServerAutoscaling


class Autoscaler:
    """Says when to start or stop a server; whoever asks does so.

    Attributes:
        most: bound on the servers; lowered where one more cannot be started.
    """

    def __init__(self, plan: ServerAutoscaling, least: int) -> None:
        self.least, self.most = least, plan.max_servers
        self._plan = plan
        self._direction, self._since = 0, 0.0

    def wanted(self, in_flight: int) -> int:
        """Servers of which each has `target_ongoing_requests` at most, within the bounds."""
        return max(self.least, min(math.ceil(in_flight / self._plan.target_ongoing_requests), self.most))

    def change(self, now: float, in_flight: int, servers: int) -> int:
        """1 to start a server, -1 to stop one, else 0.

        Args:
            now: seconds on a clock that only goes forward; each call is an observation of what has been so since the
                one before.
        """
        wanted = self.wanted(in_flight)
        direction = (wanted > servers) - (wanted < servers)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay = self._plan.upscale_delay if direction > 0 else self._plan.downscale_delay
        if direction == 0 or now - self._since < delay:
            return 0
        self._since = now
        return direction
