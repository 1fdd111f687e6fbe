"""Settings of the policy server."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Literal

from pydantic import Field, PositiveInt

from armature.components.contracts.machine import ADDRESS
from armature.components.contracts.settings import Settings
from armature.components.robots.policies.settings import Quantization


class PolicyServerSettings(Settings):
    """Address, message format, inference and limits of a policy server.

    Example:
        >>> PolicyServerSettings(host="0.0.0.0", batch=1).local
        False
    """

    host: str = Field("127.0.0.1", min_length=1)
    """Address of this machine to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port to listen on; 0 takes a free one."""
    cameras: tuple[str, ...] = ()
    """Names under which clients send the cameras, in the policy's order; empty: the policy's names."""
    state: str = Field("observation.state", min_length=1)
    """Name under which clients send the state."""
    inference_action_mode: Literal["continuous", "discrete"] = "continuous"
    """Predict actions by flow matching (continuous) or as tokens (discrete); the policy must be trained for it."""
    n_action_steps: PositiveInt | None = None
    """Number of actions in an answer; none: the policy's."""
    num_inference_steps: PositiveInt | None = None
    """Number of Euler steps; none: the policy's."""
    torch_compile: bool = False
    """Compile the policy's layers at the first prediction."""
    quantization: Quantization | None = None
    """Quantization of the text layers' matrix products; fp8 computes them in 8 bits."""
    batch: PositiveInt = 8
    """Largest number of requests computed together. On a GPU every pass has this many rows, so 1 is fastest for one
    robot."""
    max_waiting: PositiveInt = 64
    """Largest number of requests in the queue; further requests are refused as busy."""
    max_message_mib: PositiveInt = 64
    """Largest message of a client, in MiB."""
    metrics: str | None = Field(None, pattern=ADDRESS)
    """Address for Prometheus metrics, for example 127.0.0.1:9464; none: no metrics are served. It has no password:
    everybody who reaches it can read the metrics."""

    @property
    def local(self) -> bool:
        """True if only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
