"""Images as encoded bytes, and references to stored images by the hash of their content."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import sha256

from armature.components.contracts.errors import DataError

VIDEO = "image/apng"
"""Media type of a video, which is stored as an animated PNG; see `armature.components.artifacts.videos`."""
_DATA_URL = re.compile(r"data:(image/[a-z]+);base64,(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The bytes of an image file, as an environment returns them or the image store keeps them.

    A video is an image of several frames: `armature.encode_video` and `armature.read_video` make it.

    >>> EncodedImage.from_url("data:image/png;base64,iVBORw==").media_type
    'image/png'
    """

    data: bytes
    media_type: str  # "image/png", "image/jpeg", "image/webp", or "image/apng" for a video

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes) or not isinstance(self.media_type, str):
            received = f"{type(self.data).__name__} and {self.media_type!r:.80}"
            raise DataError(
                f"an encoded image is bytes and a media type, not {received}",
                code="invalid_encoded_image",
                remedy="encode pixels with armature.components.artifacts.images.encode_png",
            )

    @classmethod
    def from_url(cls, url: str) -> EncodedImage:
        """Return the image in a data URL.

        Raises:
            DataError: it is another kind of URL, which is never fetched, or its base64 is damaged.
        """
        match = _DATA_URL.fullmatch(url)
        if match is None:
            raise DataError(
                f"an image is passed by URL, {url[:80]!r}",
                code="image_passed_by_url",
                remedy="give its bytes as data:image/...;base64,...",
            )
        try:
            return cls(b64decode(match[2], validate=True), match[1])
        except binascii.Error as error:
            raise DataError(f"an image's base64 is damaged: {error}", code="image_unreadable") from error

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return data_url(self.data, self.media_type)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes, which names the image in the store."""
        return sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A reference to an image in the image store, which holds the bytes that the model server receives.

    `width` and `height` are in pixels of the upright image, after its EXIF rotation.
    """

    sha256: str
    media_type: str
    width: int
    height: int


def data_url(data: bytes, media_type: str) -> str:
    """Return the bytes of an image as a data URL."""
    return f"data:{media_type};base64,{b64encode(data).decode()}"
