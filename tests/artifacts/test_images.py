"""The image store keeps exact bytes and refuses what is not an honest image."""

from __future__ import annotations

import base64
import io
import socket
import struct
import threading
import zlib

import numpy as np
import pytest
from PIL import Image

from components.artifacts import references
from components.artifacts.images import ImageStore, encode_png
from components.artifacts.references import load_reference
from components.contracts.errors import DataError
from components.contracts.images import EncodedImage, ImageRef


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


def test_bytes_come_back_and_are_stored_once(store, image):
    encoded = encode_png(image)
    ref = store.put(encoded)
    assert store.put(encoded) == ref
    assert (ref.width, ref.height) == (30, 20)
    assert store.read(ref) == encoded.data
    assert np.array_equal(np.asarray(store.open(ref)), np.asarray(image))
    assert sum(path.is_file() for path in store.root.rglob("*")) == 1


@pytest.mark.parametrize(
    ("data", "media_type", "reason"),
    [
        (b"not an image", "image/png", "not a readable image"),
        (png_bomb(60_000, 60_000), "image/png", r"not a readable image: .*exceeds limit"),
        (png_bomb(8_500, 8_500), "image/png", "pixels, more than"),
        (b"<svg/>", "image/svg+xml", "media type"),
        (b"\0" * (33 * 2**20), "image/png", "bytes, more than"),
    ],
)
def test_hostile_images_are_refused(store, data, media_type, reason):
    with pytest.raises(DataError, match=reason):
        store.put(EncodedImage(data, media_type))
    assert not store.root.exists()


def test_truncated_and_mislabeled_images_are_refused(store, image):
    data = encode_png(image).data
    with pytest.raises(DataError, match=r"damaged|not a readable"):
        store.put(EncodedImage(data[: len(data) // 2], "image/png"))
    with pytest.raises(DataError, match="bytes are PNG"):
        store.put(EncodedImage(data, "image/jpeg"))


def test_a_reference_cannot_leave_the_root(store):
    with pytest.raises(DataError, match="not an image reference"):
        store.read(ImageRef("../" * 20 + "etc/passwd", "image/png", 1, 1))


def test_missing_and_changed_images_are_said(store, image):
    ref = store.put(encode_png(image))
    store.path(ref).write_bytes(b"other")
    with pytest.raises(DataError, match="has changed"):
        store.read(ref)
    store.path(ref).unlink()
    with pytest.raises(DataError, match="not in the image store"):
        store.read(ref)


def test_files_stay_under_their_root(tmp_path, image):
    root = tmp_path / "root"
    root.mkdir()
    image.save(root / "in.png")
    image.save(tmp_path / "out.png")
    (root / "link.png").symlink_to(tmp_path / "out.png")
    assert load_reference("in.png", root).data == (root / "in.png").read_bytes()
    for outside in ("../out.png", str(tmp_path / "out.png"), "link.png"):
        with pytest.raises(DataError, match="outside its root"):
            load_reference(outside, root)
    with pytest.raises(DataError, match="need a root"):
        load_reference("in.png")


def test_data_urls(image):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert load_reference(url) == EncodedImage(buffer.getvalue(), "image/jpeg")
    with pytest.raises(DataError, match="damaged"):
        load_reference("data:image/png;base64,@@@@")


def test_web_addresses_are_off_unless_allowed_and_cannot_hang(monkeypatch):
    with pytest.raises(DataError, match="not allowed"):
        load_reference("http://127.0.0.1:9/x.png")
    monkeypatch.setattr(references, "FETCH_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = threading.Thread(target=server.accept, daemon=True)
        accepted.start()
        with pytest.raises(DataError, match="could not be fetched"):
            load_reference(f"http://127.0.0.1:{server.getsockname()[1]}/x.png", allow_urls=True)
