"""Where a server is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and the key that it wants."""

    url: str
    api_key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}
