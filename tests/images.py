"""Images in every mode, orientation and format that an environment may give, as bytes or as Pillow's, by name."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from armature.components.artifacts.images import encode_png
from armature.components.contracts.images import EncodedImage

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "MPO": "image/jpeg"}
WIDTH, HEIGHT = 72, 44
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'


def noise(seed: Any, width: int = 56, height: int = 56) -> Image.Image:
    """Return an RGB image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def image_part(image: Image.Image) -> dict[str, Any]:
    """Return the image as a part of a chat message in the format of OpenAI's API."""
    return {"type": "image_url", "image_url": {"url": encode_png(image).url}}


def scene(width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Return the RGBA pixels of an image without any symmetry, (height, width, 4) uint8. Alpha takes values from 0 to
    255."""
    rows, columns = np.mgrid[:height, :width]
    red, green = 255 * columns // (width - 1), 255 * rows // (height - 1)
    blue = np.random.default_rng(0).integers(0, 256, (height, width))
    alpha = 255 * ((columns + 2 * rows) % width) // (width - 1)
    return np.stack([red, green, blue, alpha], -1).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> EncodedImage:
    stream = io.BytesIO()
    image.save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}) | options)
    return EncodedImage(stream.getvalue(), MEDIA_TYPES[kind])


def raw_png(width: int, height: int, depth: int, color: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> EncodedImage:
    """Return a PNG with any bit depth and color type.

    Args:
        rows: the bytes of all pixel rows, without PNG's filter bytes.
        chunks: types and contents of further chunks, which are written before the pixels.
    """
    size = len(rows) // height
    data = b"".join(b"\0" + rows[start : start + size] for start in range(0, len(rows), size))
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )
    return EncodedImage(b"\x89PNG\r\n\x1a\n" + body, "image/png")


def exif(orientation: Any) -> Image.Exif:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def palette(alpha: bool) -> Image.Image:
    image = Image.fromarray(scene()[..., :3]).quantize(64)
    if alpha:
        image.info["transparency"] = bytes(range(0, 256, 4))
    return image


@cache
def pillow_images() -> dict[str, Image.Image]:
    """Return one image for each Pillow mode that has a defined conversion to 8-bit RGB, by name."""
    rgba = Image.fromarray(scene())
    rgb = rgba.convert("RGB")
    sixteen = Image.fromarray(scene()[..., 2].astype(np.uint16) * 256 + scene()[..., 0])
    return {
        **{mode: rgb.convert(mode) for mode in ("1", "L", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")},
        **{mode: rgba.convert(mode) for mode in ("LA", "RGBA", "RGBa")},
        "La": rgba.convert("LA").convert("La"),
        "P": palette(False),
        "P, alpha by color": palette(True),
        "PA": palette(False).convert("PA"),
        "I;16": sixteen,
    }


@cache
def plain_images() -> dict[str, EncodedImage]:
    """Return images that are RGB, upright and without transparency, by name. Such images are stored unchanged, byte for
    byte."""
    rgb = pillow_images()["RGB"]
    kinds = ("PNG", "JPEG", "WEBP")
    profile = b"\0" * 128  # what a decoder that ignores color profiles does not look at
    gamma = (b"gAMA", struct.pack(">I", 200_000))
    return {
        "PNG": encoded(rgb, "PNG"),
        "PNG ICC": encoded(rgb, "PNG", icc_profile=profile),
        "PNG gamma": raw_png(WIDTH, HEIGHT, 8, 2, rgb.tobytes(), gamma),
        "PNG 16-bit": raw_png(WIDTH, HEIGHT, 16, 2, np.repeat(scene()[..., :3], 2, -1).tobytes()),
        "JPEG": encoded(rgb, "JPEG"),
        "JPEG progressive": encoded(rgb, "JPEG", progressive=True, quality=40),
        "JPEG ICC": encoded(rgb, "JPEG", icc_profile=profile),
        "JPEG EXIF 1": encoded(rgb, "JPEG", exif=exif(1)),
        "JPEG EXIF without a header": encoded(rgb, "JPEG", exif=b"Exif\0\0garbage" * 9),
        **{f"{kind} EXIF damaged": encoded(rgb, kind, exif=b"Exif\0\0II*\0\xff\xff\xff\xff") for kind in kinds},
        "WEBP": encoded(rgb, "WEBP"),
        "WEBP lossy": encoded(rgb, "WEBP", lossless=False),
    }


@cache
def turned_images() -> dict[str, EncodedImage]:
    """Return images with an orientation other than upright, by name: in every format, and with every orientation in
    EXIF or XMP."""
    images = pillow_images()
    turned = {
        f"{kind} {mode} EXIF {number}": encoded(images[mode], kind, exif=exif(number))
        for kind, mode in (("PNG", "RGB"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("PNG", "RGBA"), ("WEBP", "RGBA"))
        for number in range(2, 9)
    }
    turned |= {f"JPEG {mode} EXIF 6": encoded(images[mode], "JPEG", exif=exif(6)) for mode in ("L", "CMYK")}
    turned |= {f"JPEG XMP {number}": encoded(images["RGB"], "JPEG", xmp=XMP % number) for number in (3, 6)}
    turned |= {f"PNG {mode} EXIF 6": encoded(images[mode], "PNG", exif=exif(6)) for mode in ("LA", "P", "I;16")}
    return turned


@cache
def other_images() -> dict[str, EncodedImage]:
    """Return upright images in modes other than RGB or with transparency, by name."""
    images, low = pillow_images(), scene()[..., 2]
    rgb, both = images["RGB"], np.repeat(scene()[..., 2:], 2, -1)
    bits = {depth: np.packbits(np.unpackbits(low[..., None], axis=-1)[..., :depth].reshape(HEIGHT, -1), axis=1)
            for depth in (1, 2, 4)}  # fmt: skip
    gray = {f"PNG gray {depth}-bit": raw_png(WIDTH, HEIGHT, depth, 0, bits[depth].tobytes()) for depth in bits}
    clear = {
        f"PNG gray {depth}-bit, one transparent": raw_png(
            WIDTH, HEIGHT, depth, 0, bits[depth].tobytes(), (b"tRNS", b"\0\1")
        )
        for depth in bits
    }
    sixteen = np.where(low < 128, low.astype(">u2") * 257, 1000).astype(">u2")
    return (
        gray
        | clear
        | {
            **{f"PNG {mode}": encoded(images[mode], "PNG") for mode in ("L", "LA", "P", "RGBA", "1", "I;16")},
            "PNG RGB, one transparent": encoded(rgb, "PNG", transparency=rgb.getpixel((5, 5))),
            "PNG L, one transparent": encoded(images["L"], "PNG", transparency=100),
            "PNG P, one transparent": encoded(images["P"], "PNG", transparency=7),
            "PNG P, alpha by color": encoded(images["P, alpha by color"], "PNG"),
            "PNG 16-bit gray, one transparent": raw_png(
                WIDTH, HEIGHT, 16, 0, sixteen.tobytes(), (b"tRNS", struct.pack(">H", 1000))
            ),
            "PNG 16-bit LA": raw_png(WIDTH, HEIGHT, 16, 4, both.tobytes()),
            "PNG 16-bit RGBA": raw_png(WIDTH, HEIGHT, 16, 6, np.repeat(scene(), 2, -1).tobytes()),
            **{f"JPEG {mode}": encoded(images[mode], "JPEG") for mode in ("L", "CMYK")},
            "MPO": encoded(rgb, "MPO", save_all=True, append_images=[rgb.rotate(180)]),
            "WEBP RGBA": encoded(images["RGBA"], "WEBP", exact=True),
            "WEBP RGBA lossy": encoded(images["RGBA"], "WEBP", lossless=False),
            "PNG EXIF without a header": encoded(rgb, "PNG", exif=b"Exif\0\0garbage" * 9),
            "WEBP EXIF without a header": encoded(rgb, "WEBP", exif=b"Exif\0\0garbage" * 9),
            "JPEG EXIF 9": encoded(rgb, "JPEG", exif=exif(9)),
        }
    )


def every_image() -> dict[str, EncodedImage]:
    return plain_images() | turned_images() | other_images()


@cache
def refused_images() -> dict[str, tuple[EncodedImage, str]]:
    """Return images that must be rejected, by name, each with the code of the error."""
    rgb = pillow_images()["RGB"]
    frames: dict[str, Any] = {"save_all": True, "append_images": [rgb.rotate(90)]}
    transparent = (b"tRNS", struct.pack(">HHH", 1, 2, 3))
    jpeg = encoded(Image.new("L", (2000, 2000), 128), "JPEG", progressive=True).data
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return {
        "animated PNG": (encoded(rgb, "PNG", **frames), "image_animated"),
        "animated WEBP": (encoded(rgb, "WEBP", **frames), "image_animated"),
        "truncated WEBP": (cut(encoded(rgb, "WEBP", lossless=False)), "image_unreadable"),
        "truncated JPEG": (cut(encoded(rgb, "JPEG")), "image_unreadable"),
        "truncated PNG": (cut(encoded(rgb, "PNG")), "image_unreadable"),
        "no width": (raw_png(0, 2, 8, 2, b"\0\0"), "image_unreadable"),
        "16-bit color with a transparent one": (
            raw_png(WIDTH, HEIGHT, 16, 2, np.repeat(scene()[..., :3], 2, -1).tobytes(), transparent),
            "transparent_color_16_bit",
        ),
        "too many scans": (EncodedImage(jpeg[:-2] + scan * 2000 + jpeg[-2:], "image/jpeg"), "image_too_many_scans"),
        "transparency cut short": (raw_png(2, 2, 8, 0, b"\0\0\0\0", (b"tRNS", b"\0")), "image_unreadable"),
        "GIF": (EncodedImage(as_bytes(rgb, "GIF"), "image/gif"), "unknown_media_type"),
        "TIFF that says PNG": (EncodedImage(as_bytes(rgb, "TIFF"), "image/png"), "image_unreadable"),
    }


def as_bytes(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def cut(image: EncodedImage) -> EncodedImage:
    return EncodedImage(image.data[: len(image.data) // 2], image.media_type)
