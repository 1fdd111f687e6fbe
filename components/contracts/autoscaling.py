"""When a run starts more model servers, and when it stops them."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from armature.components.contracts.settings import Settings


class ServerAutoscaling(Settings):
    """Servers between `machine.servers`, with which a run starts, and `max_servers`."""

    max_servers: PositiveInt = Field(description="Most servers at once; machine.servers is the least.")
    target_ongoing_requests: PositiveInt = Field(
        32, description="Requests in flight that one server is to have: another one is started where they are more."
    )
    upscale_delay: NonNegativeFloat = Field(
        10.0, description="Seconds that there have to be too many requests before a server is started."
    )
    downscale_delay: NonNegativeFloat = Field(
        300.0, description="Seconds that one server less has to be enough before a server is stopped."
    )
