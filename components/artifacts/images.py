"""The image store: every image once, under the SHA-256 of its encoded bytes."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from components.contracts.errors import DataError
from components.contracts.images import EncodedImage, ImageRef

FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
MAX_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 10**6


def encode_png(image: Image.Image) -> EncodedImage:
    """The image as PNG bytes, without metadata."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return EncodedImage(buffer.getvalue(), "image/png")


def decode(image: EncodedImage) -> Image.Image:
    """The decoded RGB image.

    Raises:
        DataError: too large, not of the media type that it claims, truncated, or a decompression bomb.
    """
    if image.media_type not in FORMATS:
        raise DataError(f"media type {image.media_type!r} is not one of {', '.join(FORMATS)}")
    if len(image.data) > MAX_BYTES:
        raise DataError(f"the image file has {len(image.data)} bytes, more than {MAX_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(image.data), formats=tuple(FORMATS.values()))
            if opened.format != FORMATS[image.media_type]:
                raise DataError(f"the bytes are {opened.format}, the media type says {image.media_type}")
            if opened.width * opened.height > MAX_PIXELS:
                raise DataError(f"the image has {opened.width}x{opened.height} pixels, more than {MAX_PIXELS}")
            return opened.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"not a readable image: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
        raise DataError(f"the image is damaged: {error}") from error


class ImageStore:
    """Images in `<root>/<first two digits>/<sha256>.<format>`; written once, never changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, ref: ImageRef) -> Path:
        """
        Raises:
            DataError: the reference is not a SHA-256 of a known media type (so no path leaves the root).
        """
        if len(ref.sha256) != 64 or set(ref.sha256) - set("0123456789abcdef") or ref.media_type not in FORMATS:
            raise DataError(f"not an image reference: {ref.sha256!r} ({ref.media_type})", where=str(self.root))
        return self.root / ref.sha256[:2] / f"{ref.sha256}.{FORMATS[ref.media_type].lower()}"

    def put(self, image: EncodedImage) -> ImageRef:
        """Validate `image` and keep it.

        Raises:
            DataError: see `decode`.
        """
        decoded = decode(image)
        ref = ImageRef(image.sha256, image.media_type, decoded.width, decoded.height)
        path = self.path(ref)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(image.data)
                Path(temporary).rename(path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        return ref

    def read(self, ref: ImageRef) -> bytes:
        """The encoded bytes.

        Raises:
            DataError: the store does not have this image, or its bytes have changed.
        """
        path = self.path(ref)
        try:
            image = EncodedImage(path.read_bytes(), ref.media_type)
        except FileNotFoundError as error:
            raise DataError(
                f"image {ref.sha256[:12]} is not in the image store",
                where=str(path),
                remedy="collect the rollouts again, or copy the image store along with the artifact",
            ) from error
        if image.sha256 != ref.sha256:
            raise DataError(f"image {ref.sha256[:12]} has changed on disk", where=str(path), remedy="delete the file")
        return image.data

    def open(self, ref: ImageRef) -> Image.Image:
        """The decoded RGB image."""
        return decode(EncodedImage(self.read(ref), ref.media_type))
