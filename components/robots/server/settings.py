"""How a robot policy answers, where its server listens, and how much it takes."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Literal

from pydantic import Field, PositiveInt

from armature.components.contracts.machine import ADDRESS
from armature.components.contracts.settings import Settings
from armature.components.robots.policies.settings import Quantization


class PolicyServerSettings(Settings):
    """What robots connect to."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address of this machine to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    cameras: tuple[str, ...] = ()
    """What clients call the cameras, in the policy's order; empty: as the policy does."""
    state: str = Field("observation.state", min_length=1)
    """What clients call the state."""
    inference_action_mode: Literal["continuous", "discrete"] = "continuous"
    """Actions by flow matching, or as tokens; the policy must have been trained for it."""
    n_action_steps: PositiveInt | None = None
    """Actions of an answer; none: the policy's own."""
    num_inference_steps: PositiveInt | None = None
    """Euler steps; none: the policy's own."""
    torch_compile: bool = False
    """Compile the policy's layers at its first answer."""
    quantization: Quantization | None = None
    """fp8: products of the text layers in 8 bits."""
    batch: PositiveInt = 8
    """Requests that are answered at once. On a GPU each pass is as large: for one robot 1 is fastest."""
    max_waiting: PositiveInt = 64
    """Requests that wait at most; more are refused as busy."""
    max_message_mib: PositiveInt = 64
    """Largest message of a client, in MiB."""
    metrics: str | None = Field(None, pattern=ADDRESS)
    """Address (127.0.0.1:9464) that shows numbers to Prometheus; none: nothing listens. It asks for no password:
    whoever reaches it can read them."""

    @property
    def local(self) -> bool:
        """Whether only programs of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
