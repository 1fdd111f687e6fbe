"""Where a server is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, the key that it wants, and the id of the lease under which it is asked ("": none)."""

    url: str
    api_key: str
    lease: str = ""

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"}
        return key | {"X-Armature-Lease": self.lease} if self.lease else key
