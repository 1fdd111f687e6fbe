"""Images as they travel: encoded bytes at the border, references by content everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image file's bytes, as the model server will receive them."""

    data: bytes
    media_type: str  # "image/png", "image/jpeg" or "image/webp"

    @property
    def sha256(self) -> str:
        return sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Names an image in the image store. `width` and `height` are pixels of the decoded image."""

    sha256: str
    media_type: str
    width: int
    height: int
