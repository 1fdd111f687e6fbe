"""Where a server is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, the key that it wants, and the id of the lease under which it is asked ("": none).

    `joined` is another number once the server may be another process: connections of before are of no more use.
    """

    url: str
    api_key: str
    lease: str = ""
    joined: int = 0

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"}
        return key | {"X-Armature-Lease": self.lease} if self.lease else key
