"""The image store: every image once, as both sides see it, under the SHA-256 of its encoded bytes."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile

from armature.components.artifacts.disk import write_files
from armature.components.artifacts.tables import IMAGE_REF
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular
from armature.components.contracts.images import EncodedImage, ImageRef

# Pixels as trainer and server both see them: 8-bit RGB, upright, on white.

_TURNED: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_KEY_SCALES = {"L;2": 85, "L;4": 17}  # Pillow spreads 2 and 4-bit gray over 0 to 255, but not its transparent value


def to_rgb(image: Image.Image) -> Image.Image:
    """A copy of `image` in mode RGB and without metadata: the EXIF (or XMP) orientation applied, transparency
    composited on white, 16-bit gray by its high byte as Pillow reads 16-bit colors. Color profiles and gamma are
    ignored, as model servers ignore them.

    Raises:
        DataError: no pixels, or no defined conversion to 8 bits.
    """
    return rgb_and_plain(image)[0]


def rgb_and_plain(image: Image.Image) -> tuple[Image.Image, bool]:
    """`to_rgb(image)`, and whether every decoder shows it so: it is RGB, upright and without transparency.

    Raises:
        DataError: see `to_rgb`.
    """
    if not image.width or not image.height:
        raise DataError(f"an image of {image.width}x{image.height} pixels is empty", code="image_empty")
    key = _transparent_value(image)
    image.load()
    orientation = _orientation(image)
    rgb = _flattened(image, key)
    if orientation in _TURNED:
        rgb = rgb.transpose(_TURNED[orientation])
    rgb.info = {}
    return rgb, image.mode == "RGB" and not image.has_transparency_data and orientation == 1


def _orientation(image: Image.Image) -> object:
    """The EXIF or XMP orientation, 1 where there is none, None where it cannot be read: then nobody turns the image.

    Asked again after an error, Pillow answers that there is none.
    """
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged metadata raises whatever Pillow runs into
        return None


def _transparent_value(image: Image.Image) -> object:
    """What the image's `transparency` means in its pixels. Only a PNG that is not yet loaded tells its bit depth."""
    key = image.info.get("transparency")
    if key is None or not isinstance(image, PngImageFile) or not image.tile:
        return key
    depth = str(image.tile[0].args)
    if depth == "RGB;16B":
        raise DataError(
            "a 16-bit color is transparent, and pixels are read as 8 bits",
            code="transparent_color_16_bit",
            remedy="save it with an alpha channel",
        )
    return key * _KEY_SCALES.get(depth, 1) if isinstance(key, int) else key


def _flattened(image: Image.Image, key: object) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _from_16_bits(image, key)
    if image.mode in ("I", "F"):
        raise DataError(
            f"pixels of mode {image.mode} are 32-bit numbers of no set range",
            code="image_mode_unsupported",
            remedy="scale them to 8 or 16 bits",
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    if key != image.info.get("transparency"):
        image = image.copy()
        image.info["transparency"] = key
    # Pillow converts La to LA only.
    return _on_white((image.convert("LA") if image.mode == "La" else image).convert("RGBA"))


def _from_16_bits(image: Image.Image, key: object) -> Image.Image:
    values = np.asarray(image)
    gray = Image.fromarray((values >> 8).astype(np.uint8))
    if key is None:
        return gray.convert("RGB")
    alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return _on_white(Image.merge("LA", (gray, alpha)).convert("RGBA"))


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


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


# The images that the tables of one artifact show, in one ZIP archive that belongs to this artifact alone.

PART_BYTES = 64 * 2**20
"""Unpacked images that are kept together: the disk is waited for once."""
_NAME = re.compile(r"([0-9a-f]{64})\.(png|jpeg|webp)")
_DATE = (1980, 1, 1, 0, 0, 0)
_MEDIA_TYPES = {name.lower(): media_type for media_type, name in FORMATS.items()}


def image_refs(folder: Path) -> list[ImageRef]:
    """The images that the tables in `folder` refer to, each once, without their sizes."""
    seen: set[tuple[str, str]] = set()
    for path in sorted(folder.rglob("*.parquet")):
        columns = [field.name for field in pq.read_schema(path) if _shows_images(field.type)]
        for column in pq.read_table(path, columns=columns).columns if columns else ():
            rows = pc.list_flatten(column)
            digests, kinds = (pc.struct_field(rows, name).to_pylist() for name in ("sha256", "media_type"))
            seen.update(zip(digests, kinds, strict=True))
    return [ImageRef(digest, kind, 0, 0) for digest, kind in sorted(seen)]


def _shows_images(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and kind.value_type == IMAGE_REF


def write_archive(images: ImageStore, refs: Iterable[ImageRef], target: Path, say: Callable[[str], None]) -> None:
    """Write the images uncompressed, under the names that they have in the image store. Those that are gone are said.

    Equal references give equal bytes.
    """
    missing = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for ref in refs:
            try:
                archive.writestr(zipfile.ZipInfo(images.path(ref).name, _DATE), images.read(ref))
            except DataError as error:
                missing.append(error.what)
    if missing:
        say(f"the remote store gets {len(missing)} images less than its tables name: {missing[0]}")


def unpack_archive(archive: Path, images: ImageStore, where: str) -> None:
    """Put the images of an archive that are not there yet into the image store.

    Raises:
        DataError: the archive is damaged, or holds something else than images; `where` is its address.
    """
    part: dict[ImageRef, bytes] = {}
    size = 0
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                matched = _NAME.fullmatch(member.filename)
                if not matched or member.compress_type != zipfile.ZIP_STORED or member.file_size > MAX_BYTES:
                    raise DataError(f"not an image: {member.filename!r}")
                ref = ImageRef(matched[1], _MEDIA_TYPES[matched[2]], 0, 0)
                if images.path(ref).exists():
                    continue
                part[ref] = packed.read(member)
                if sha256(part[ref]).hexdigest() != ref.sha256:
                    raise DataError(f"{member.filename} has other bytes than its name says")
                size += member.file_size
                if size > PART_BYTES:
                    images.keep(part)
                    part, size = {}, 0
        images.keep(part)
    except (DataError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:  # as of one with a password
        raise DataError(
            f"the remote copy is damaged: {error}",
            code="remote_copy_damaged",
            where=where,
            remedy="where the images are, run the stage again with --force",
        ) from error
