"""Images as they travel: encoded bytes at the border, references by content everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from components.contracts.errors import DataError


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image file's bytes, as an environment gives them or as the image store keeps them."""

    data: bytes
    media_type: str  # "image/png", "image/jpeg" or "image/webp"

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes) or not isinstance(self.media_type, str):
            given = f"{type(self.data).__name__} and {self.media_type!r:.80}"
            raise DataError(
                f"an encoded image is bytes and a media type, not {given}",
                remedy="encode pixels with components.artifacts.images.encode_png",
            )

    @property
    def sha256(self) -> str:
        return sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Names an image in the image store, which holds the bytes that the model server receives.

    `width` and `height` are pixels of the image as it is seen: upright.
    """

    sha256: str
    media_type: str
    width: int
    height: int
