"""The image store keeps exact bytes and rejects damaged, mislabeled and hostile images."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.images import EncodedImage, ImageRef
from tests.refusals import refused


@pytest.fixture
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))


@pytest.fixture
def store(tmp_path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def png_bomb(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"\0" * 1000)
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (body, pixels)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


WHITE_PNG = encode_png(Image.new("RGB", (64, 64), "white")).data


def test_stored_bytes_are_returned_and_stored_once(store, image):
    encoded = encode_png(image)
    ref = store.put(encoded)
    assert store.put(encoded) == ref
    assert (ref.width, ref.height) == (30, 20)
    assert store.read(ref) == encoded.data
    assert np.array_equal(np.asarray(store.open(ref)), np.asarray(image))
    assert sum(path.is_file() for path in store.root.rglob("*")) == 1


@pytest.mark.parametrize(
    ("data", "media_type", "code", "values"),
    [
        (b"not an image", "image/png", "image_unreadable", ()),
        (png_bomb(60_000, 60_000), "image/png", "image_too_large", ()),
        (png_bomb(8_500, 8_500), "image/png", "image_too_large", ()),
        (b"<svg/>", "image/svg+xml", "unknown_media_type", ()),
        (b"\0" * (33 * 2**20), "image/png", "image_file_too_large", ()),
        (WHITE_PNG[: len(WHITE_PNG) // 2], "image/png", "image_unreadable", ()),
        (WHITE_PNG, "image/jpeg", "media_type_mismatch", ("PNG", "image/jpeg")),
    ],
    ids=["no image", "bomb", "too many pixels", "SVG", "too many bytes", "truncated", "wrong media type"],
)
def test_rejects_hostile_images(store, data, media_type, code, values):
    with refused(code, *values):
        store.put(EncodedImage(data, media_type))
    assert not store.root.exists()


def test_rejects_reference_outside_the_store(store):
    with refused("invalid_image_reference"):
        store.read(ImageRef("../" * 20 + "etc/passwd", "image/png", 1, 1))


def test_rejects_missing_and_changed_images(store, image):
    ref = store.put(encode_png(image))
    store.path(ref).write_bytes(b"other")
    with refused("image_changed", store.path(ref)):
        store.read(ref)
    store.path(ref).unlink()
    with refused("image_missing", store.path(ref)):
        store.read(ref)


def test_data_url_round_trip(image):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert EncodedImage.from_url(url) == EncodedImage(buffer.getvalue(), "image/jpeg")
    assert EncodedImage.from_url(url).url == url
    with refused("image_unreadable"):
        EncodedImage.from_url("data:image/png;base64,@@@@")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x.png", "../out.png", "data:text/html;base64,AAAA", "data:image/png,"]
)
def test_rejects_other_urls(url):
    with refused("image_passed_by_url"):
        EncodedImage.from_url(url)
