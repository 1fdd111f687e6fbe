"""The image store: each image once, under the SHA-256 of its encoded bytes, in a form that every decoder shows alike.

Trainer and model server decode images with different libraries. Images are therefore stored such that both see the same
8-bit RGB pixels, upright and without transparency.
"""

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
from armature.components.artifacts.videos import Video, decode_video, video_times
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import regular
from armature.components.contracts.images import VIDEO, EncodedImage, ImageRef

# --- Conversion to 8-bit RGB, upright, on white ---

_TURNED: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Pillow's transformation that makes an image upright, by the image's EXIF orientation. Orientation 1 is upright
already."""
_KEY_SCALES = {"L;2": 85, "L;4": 17}
"""Factors for the transparent gray value of a PNG, by bit depth. Pillow scales 2- and 4-bit gray pixels to 0..255, but
does not scale that value."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Return a copy of `image` in mode RGB without metadata.

    The EXIF or XMP orientation is applied, transparency is composited on white, and 16-bit gray keeps its high byte, as
    Pillow reads 16-bit colors. Color profiles and gamma are ignored, as model servers ignore them.

    Raises:
        DataError: the image has no pixels, or its mode has no defined conversion to 8 bits.
    """
    return rgb_and_plain(image)[0]


def rgb_and_plain(image: Image.Image) -> tuple[Image.Image, bool]:
    """Return `to_rgb(image)`, and True if the original needs no conversion: it is RGB, upright and without
    transparency.

    Raises:
        DataError: see `to_rgb`.
    """
    if not image.width or not image.height:
        raise DataError(f"an image of {image.width}x{image.height} pixels is empty", code="image_empty")
    key = _transparent_value(image)
    image.load()
    orientation = _orientation(image)
    rgb = _convert_to_rgb(image, key)
    if orientation in _TURNED:
        rgb = rgb.transpose(_TURNED[orientation])
    rgb.info = {}
    return rgb, image.mode == "RGB" and not image.has_transparency_data and orientation == 1


def _orientation(image: Image.Image) -> object:
    """Return the EXIF or XMP orientation: 1 if the image has none, None if the metadata is damaged.

    Decoders do not turn an image with damaged metadata. Call this once per image: after an error, Pillow reports that
    there is no orientation.
    """
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged metadata makes Pillow raise errors of any type
        return None


def _transparent_value(image: Image.Image) -> object:
    """Return the transparent pixel value of an image, in the range of Pillow's decoded pixels.

    Call this before the pixels are loaded: only then does Pillow expose the bit depth of a PNG.
    """
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


def _convert_to_rgb(image: Image.Image, key: object) -> Image.Image:
    """Convert an image to RGB. `key` is its transparent pixel value, or None."""
    if image.mode.startswith("I;16"):
        return _from_16_bit_gray(image, key)
    if image.mode in ("I", "F"):
        raise DataError(
            f"pixels of mode {image.mode} are 32-bit numbers without a defined range",
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


def _from_16_bit_gray(image: Image.Image, key: object) -> Image.Image:
    """Convert 16-bit gray to RGB by its high byte; pixels equal to `key` become white."""
    values = np.asarray(image)
    gray = Image.fromarray((values >> 8).astype(np.uint8))
    if key is None:
        return gray.convert("RGB")
    alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return _on_white(Image.merge("LA", (gray, alpha)).convert("RGBA"))


def _on_white(image: Image.Image) -> Image.Image:
    """Composite an RGBA image on white."""
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", VIDEO: "APNG"}
"""Supported image formats: Pillow's name of the format, by media type. Pillow calls an animated PNG (APNG) a PNG."""
MAX_BYTES = 32 * 2**20
"""Largest allowed size of an encoded image, in bytes."""
MAX_PIXELS = 64 * 10**6
"""Largest allowed number of pixels of an image, or of all frames of a video."""
MAX_SCANNED = 100 * MAX_PIXELS
"""Largest allowed product of pixels and scans of a progressive JPEG. Decoding a scan takes time for all pixels,
although the scan may have few bytes."""
LARGE_PIXELS = 2**22
"""Images with more pixels are decoded one at a time; the largest needs about 1 GB while it is decoded."""
COMPRESSION = 1
"""Level of zlib for PNG files. A frame of 448 x 448 takes 14 ms; at the default level 6 it takes 48 ms and the file is
13 % smaller."""
_large = Lock()


def encode_png(image: Image.Image) -> EncodedImage:
    """Encode an image as an RGB PNG without metadata; `to_rgb` says how other modes are converted.

    Raises:
        DataError: the image has no pixels, or no defined conversion to RGB.
    """
    return _png(to_rgb(image))


def _png(rgb: Image.Image) -> EncodedImage:
    buffer = io.BytesIO()
    rgb.save(buffer, "PNG", compress_level=COMPRESSION)
    return EncodedImage(buffer.getvalue(), "image/png")


def decode(image: EncodedImage) -> Image.Image:
    """Decode an image, or the first frame of a video, to upright RGB on white, see `to_rgb`.

    Raises:
        DataError: the image is too large, animated, truncated, a decompression bomb, or not of its media type.
    """
    with _opened(image) as opened:
        return to_rgb(opened)


def normalized(image: EncodedImage) -> tuple[EncodedImage, Image.Image]:
    """Return an encoded image that every decoder decodes to the same pixels, and these pixels.

    The result for a video is `image` itself and the first frame. So it is for an image that is RGB, upright and without
    transparency. Otherwise, and if its metadata cannot be read, the result is a PNG of its pixels.

    Raises:
        DataError: see `decode`; or the PNG is too large.
    """
    if image.media_type == VIDEO:
        check_image_header(image)
        return image, decode_video(image).frames[0]
    with _opened(image) as opened:
        rgb, plain = rgb_and_plain(opened)
        encoded = image if plain and opened.format == FORMATS[image.media_type] else _png(rgb)
    if len(encoded.data) > MAX_BYTES:
        raise DataError(
            f"as an RGB PNG the image has {len(encoded.data)} bytes, more than {MAX_BYTES}",
            code="image_file_too_large",
            remedy="scale it down, or save it as an upright JPEG without transparency",
        )
    return encoded, rgb


def check_image_header(image: EncodedImage) -> None:
    """Check an image by its header alone. Damaged pixels are noticed only when they are decoded.

    Raises:
        DataError: see `decode`.
    """
    with _opened(image):
        pass


@contextmanager
def _opened(image: EncodedImage) -> Iterator[Image.Image]:
    """Open an image and read its header. Any error that Pillow raises within the block becomes a DataError."""
    if image.media_type not in FORMATS:
        raise DataError(
            f"media type {image.media_type!r} is not one of {', '.join(FORMATS)}", code="unknown_media_type"
        )
    if len(image.data) > MAX_BYTES:
        raise DataError(
            f"the image file has {len(image.data)} bytes, more than {MAX_BYTES}", code="image_file_too_large"
        )
    try:
        opened = Image.open(io.BytesIO(image.data), formats=("PNG", "JPEG", "WEBP"))
        _check_header(opened, image)
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


def _check_header(opened: Image.Image, image: EncodedImage) -> None:
    """Raise a DataError if the format, size, number of frames or number of scans is not allowed."""
    # MPO is a JPEG with further images, as phones and stereo cameras write it: the first image counts.
    actual = "JPEG" if opened.format == "MPO" else opened.format
    frames = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
    video = image.media_type == VIDEO
    if actual != ("PNG" if video else FORMATS[image.media_type]):
        raise DataError(f"the bytes are {actual}, but the media type is {image.media_type}", code="media_type_mismatch")
    pixels = opened.width * opened.height * (len(video_times(opened)) if video else 1)
    if pixels > MAX_PIXELS:
        raise DataError(
            f"the image has {opened.width}x{opened.height} pixels, more than {MAX_PIXELS}", code="image_too_large"
        )
    if frames > 1 and not video:
        raise DataError(
            f"the image is animated, with {frames} frames",
            code="image_animated",
            remedy="read it as a video with armature.read_video, or pass frames as single images",
        )
    scans = image.data.count(b"\xff\xda") if opened.info.get("progressive") else 1
    if scans * pixels > MAX_SCANNED:
        raise DataError(
            f"a progressive JPEG with {scans} scans of {opened.width}x{opened.height} pixels takes too long to decode",
            code="image_too_many_scans",
        )


class ImageStore:
    """Images in files `<root>/<first two digits>/<sha256>.<format>`, each written once and never changed.

    Example:
        >>> import tempfile
        >>> store = ImageStore(Path(tempfile.mkdtemp()))
        >>> ref = store.put(encode_png(Image.new("RGB", (4, 2), "red")))
        >>> store.open(ref).size, ref.media_type
        ((4, 2), 'image/png')
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def unfinished(self) -> Path:
        """Folder of images being written. It has few entries however many images the store holds."""
        return self.root / "unfinished"

    def path(self, ref: ImageRef) -> Path:
        """Path of an image.

        Raises:
            DataError: the reference is not a SHA-256 with a known media type. So no path can lead out of the store.
        """
        if len(ref.sha256) != 64 or set(ref.sha256) - set("0123456789abcdef") or ref.media_type not in FORMATS:
            raise DataError(
                f"not an image reference: {ref.sha256!r} ({ref.media_type})",
                code="invalid_image_reference",
                where=str(self.root),
            )
        return self.root / ref.sha256[:2] / f"{ref.sha256}.{FORMATS[ref.media_type].lower()}"

    def put(self, image: EncodedImage) -> ImageRef:
        """Check an image, store it in the form that `normalized` returns, and return a reference to that form.

        Raises:
            DataError: see `normalized`.
            OSError: the image cannot be written, as on a full disk.
        """
        image, rgb = normalized(image)
        ref = ImageRef(image.sha256, image.media_type, rgb.width, rgb.height)
        self.keep({ref: image.data})
        return ref

    def keep(self, images: Mapping[ImageRef, bytes]) -> None:
        """Write encoded images that belong to these references, except those already stored. May raise OSError."""
        files = {path: data for ref, data in images.items() if not (path := self.path(ref)).exists()}
        if files:
            for folder in {self.unfinished, *(path.parent for path in files)}:
                folder.mkdir(parents=True, exist_ok=True)
            write_files(files, beside=self.unfinished / next(iter(files)).name)

    def read(self, ref: ImageRef) -> bytes:
        """Return the encoded bytes of an image.

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

    def open(self, ref: ImageRef) -> Image.Image | Video:
        """Read an image and return its pixels as `decode` does; or all frames of a video."""
        image = EncodedImage(self.read(ref), ref.media_type)
        return decode_video(image) if ref.media_type == VIDEO else decode(image)


# --- Archive of one artifact's images, for the remote store ---

PART_BYTES = 64 * 2**20
"""Number of bytes of unpacked images that are written together. One wait for the disk then covers many images."""
_NAME = re.compile(r"([0-9a-f]{64})\.(a?png|jpeg|webp)")
_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every file in an archive. It is always the same, so archives of equal images have equal bytes."""
_MEDIA_TYPES = {name.lower(): media_type for media_type, name in FORMATS.items()}


def image_refs(folder: Path) -> list[ImageRef]:
    """Return references to all images that the tables in `folder` show. Each image is returned once; width and height
    of the references are 0."""
    seen: set[tuple[str, str]] = set()
    for path in sorted(folder.rglob("*.parquet")):
        lists = [field for field in pq.read_schema(path) if pa.types.is_list(field.type)]
        columns = [field.name for field in lists if field.type.value_type == IMAGE_REF]
        for column in pq.read_table(path, columns=columns).columns if columns else ():
            rows = pc.list_flatten(column)
            digests, kinds = (pc.struct_field(rows, name).to_pylist() for name in ("sha256", "media_type"))
            seen.update(zip(digests, kinds, strict=True))
    return [ImageRef(digest, kind, 0, 0) for digest, kind in sorted(seen)]


def write_archive(images: ImageStore, refs: Iterable[ImageRef], target: Path, say: Callable[[str], None]) -> None:
    """Write images to an uncompressed ZIP archive, under their file names in the image store. The same references
    always give the same bytes.

    Args:
        say: receives a message if some images are no longer in the store.
    """
    missing = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for ref in refs:
            try:
                archive.writestr(zipfile.ZipInfo(images.path(ref).name, _DATE), images.read(ref))
            except DataError as error:
                missing.append(error.what)
    if missing:
        say(f"{len(missing)} images of the tables are missing and not sent to the remote store: {missing[0]}")


def unpack_archive(archive: Path, images: ImageStore, where: str) -> None:
    """Add the images of an archive to the image store, except those already stored.

    Args:
        where: address of the archive, for errors.

    Raises:
        DataError: the archive is damaged, or contains something other than images.
    """
    part: dict[ImageRef, bytes] = {}
    size = 0
    try:  # a password-protected archive raises RuntimeError
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
                    raise DataError(f"the bytes of {member.filename} do not have the SHA-256 of its name")
                size += member.file_size
                if size > PART_BYTES:
                    images.keep(part)
                    part, size = {}, 0
        images.keep(part)
    except (DataError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise DataError(
            f"the remote copy is damaged: {error}",
            code="remote_copy_damaged",
            where=where,
            remedy="run the stage again with --force on a machine that has the images",
        ) from error
