"""Pixels as trainer and server both see them: 8-bit RGB, upright, on white."""

from __future__ import annotations

import numpy as np
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngImageFile

from armature.components.contracts.errors import DataError

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
