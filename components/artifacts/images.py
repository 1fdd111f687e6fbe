"""The image store: every image once, as both sides see it, under the SHA-256 of its encoded bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock

from PIL import Image, UnidentifiedImageError

from armature.components.artifacts.disk import write_files
from armature.components.artifacts.pixels import rgb_and_plain, to_rgb
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular
from armature.components.contracts.images import EncodedImage, ImageRef

FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
MAX_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 10**6
MAX_SCANNED = 100 * MAX_PIXELS
"""Pixels times scans of a progressive JPEG, whose scans each pass over all pixels and take hardly any bytes."""
LARGE_PIXELS = 2**22
"""From here on one image is decoded at a time; the largest takes about 1 GB while it is."""
COMPRESSION = 1
"""Of PNG files: a frame of 448 x 448 takes 14 ms, at zlib's own level 6 it takes 48 for a file 13 % smaller."""
_large = Lock()


def encode_png(image: Image.Image) -> EncodedImage:
    """The image as RGB PNG bytes, without metadata; see `to_rgb` for what becomes of other modes.

    Raises:
        DataError: it has no pixels, or no defined conversion to RGB.
    """
    return _png(to_rgb(image))


def _png(rgb: Image.Image) -> EncodedImage:
    buffer = io.BytesIO()
    rgb.save(buffer, "PNG", compress_level=COMPRESSION)
    return EncodedImage(buffer.getvalue(), "image/png")


def decode(image: EncodedImage) -> Image.Image:
    """The image in RGB, upright and on white: see `to_rgb`.

    Raises:
        DataError: too large, animated, not of the media type that it claims, truncated, or a decompression bomb.
    """
    with _opened(image) as opened:
        return to_rgb(opened)


def normalized(image: EncodedImage) -> tuple[EncodedImage, Image.Image]:
    """What any decoder shows as `decode` does, and its pixels: `image` itself where it is RGB, upright and without
    transparency, a PNG of its pixels otherwise, and where its metadata cannot be read.

    Raises:
        DataError: see `decode`; or the PNG is too large.
    """
    with _opened(image) as opened:
        rgb, plain = rgb_and_plain(opened)
        encoded = image if plain and opened.format == FORMATS[image.media_type] else _png(rgb)
    if len(encoded.data) > MAX_BYTES:
        raise DataError(
            f"as an RGB PNG the image has {len(encoded.data)} bytes, more than {MAX_BYTES}",
            code="image_file_too_large",
            remedy="scale it down, or give it upright and without transparency as a JPEG",
        )
    return encoded, rgb


def refuse_unreadable(image: EncodedImage) -> None:
    """Reads the header alone: pixels that are damaged are found when they are decoded.

    Raises:
        DataError: see `decode`.
    """
    with _opened(image):
        pass


@contextmanager
def _opened(image: EncodedImage) -> Iterator[Image.Image]:
    """The image with its header read; within, whatever Pillow raises of damaged bytes is a DataError."""
    if image.media_type not in FORMATS:
        raise DataError(
            f"media type {image.media_type!r} is not one of {', '.join(FORMATS)}", code="unknown_media_type"
        )
    if len(image.data) > MAX_BYTES:
        raise DataError(
            f"the image file has {len(image.data)} bytes, more than {MAX_BYTES}", code="image_file_too_large"
        )
    try:
        opened = Image.open(io.BytesIO(image.data), formats=tuple(FORMATS.values()))
        _check(opened, image)
        with _large if opened.width * opened.height > LARGE_PIXELS else nullcontext():
            yield opened
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"not a readable image: {error}", code="image_too_large") from error
    except UnidentifiedImageError as error:
        raise DataError(f"not a readable image: {error}", code="image_unreadable") from error
    except Exception as error:  # Pillow's decoders raise nearly anything
        raise DataError(f"the image is damaged: {type(error).__name__}: {error}", code="image_unreadable") from error


def _check(opened: Image.Image, image: EncodedImage) -> None:
    # A JPEG with further images, as phones and stereo cameras write it, is its first one.
    found = "JPEG" if opened.format == "MPO" else opened.format
    frames = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
    if found != FORMATS[image.media_type]:
        raise DataError(f"the bytes are {found}, the media type says {image.media_type}", code="media_type_mismatch")
    pixels = opened.width * opened.height
    if pixels > MAX_PIXELS:
        raise DataError(
            f"the image has {opened.width}x{opened.height} pixels, more than {MAX_PIXELS}", code="image_too_large"
        )
    if frames > 1:
        raise DataError(
            f"the image is animated, with {frames} frames",
            code="image_animated",
            remedy="give the frames to see as images",
        )
    scans = image.data.count(b"\xff\xda") if opened.info.get("progressive") else 1
    if scans * pixels > MAX_SCANNED:
        raise DataError(
            f"a progressive JPEG of {scans} scans of {opened.width}x{opened.height} pixels takes too long",
            code="image_too_many_scans",
        )


class ImageStore:
    """Images in `<root>/<first two digits>/<sha256>.<format>`; written once, never changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def unfinished(self) -> Path:
        """Where images are while they are written: a folder of few, whatever the store holds."""
        return self.root / "unfinished"

    def path(self, ref: ImageRef) -> Path:
        """
        Raises:
            DataError: the reference is not a SHA-256 of a known media type (so no path leaves the root).
        """
        if len(ref.sha256) != 64 or set(ref.sha256) - set("0123456789abcdef") or ref.media_type not in FORMATS:
            raise DataError(
                f"not an image reference: {ref.sha256!r} ({ref.media_type})",
                code="invalid_image_reference",
                where=str(self.root),
            )
        return self.root / ref.sha256[:2] / f"{ref.sha256}.{FORMATS[ref.media_type].lower()}"

    def put(self, image: EncodedImage) -> ImageRef:
        """Validate `image` and keep it `normalized`; the reference is to what is kept.

        Raises:
            DataError: see `normalized`.
            OSError: it cannot be written, as on a full disk.
        """
        image, rgb = normalized(image)
        ref = ImageRef(image.sha256, image.media_type, rgb.width, rgb.height)
        self.keep({ref: image.data})
        return ref

    def keep(self, images: Mapping[ImageRef, bytes]) -> None:
        """Write what is known to be the images of these references, but those that are there. Raises OSError."""
        files = {path: data for ref, data in images.items() if not (path := self.path(ref)).exists()}
        if files:
            for folder in {self.unfinished, *(path.parent for path in files)}:
                folder.mkdir(parents=True, exist_ok=True)
            write_files(files, beside=self.unfinished / next(iter(files)).name)

    def read(self, ref: ImageRef) -> bytes:
        """The encoded bytes.

        Raises:
            DataError: the store does not have this image, or its bytes have changed.
        """
        path = self.path(ref)
        try:
            image = EncodedImage(regular(path).read_bytes(), ref.media_type)
        except FileNotFoundError as error:
            raise DataError(
                f"image {ref.sha256[:12]} is not in the image store",
                code="image_missing",
                where=str(path),
                remedy="collect the rollouts again, or copy the image store along with the artifact",
            ) from error
        if image.sha256 != ref.sha256:
            raise DataError(
                f"image {ref.sha256[:12]} has changed on disk",
                code="image_changed",
                where=str(path),
                remedy="delete the file",
            )
        return image.data

    def open(self, ref: ImageRef) -> Image.Image:
        """The image as `decode` shows it."""
        return decode(EncodedImage(self.read(ref), ref.media_type))
