"""Images as they travel: encoded bytes at the border, references by content everywhere else."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import sha256

from armature.components.contracts.errors import DataError

_DATA_URL = re.compile(r"data:(image/[a-z]+);base64,(.*)", re.DOTALL)


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
                code="invalid_encoded_image",
                remedy="encode pixels with armature.components.artifacts.images.encode_png",
            )

    @classmethod
    def from_url(cls, url: str) -> EncodedImage:
        """The image in a data URL.

        Raises:
            DataError: it is another URL, of which none is fetched, or its base64 is damaged.
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
        return data_url(self.data, self.media_type)

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


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"
