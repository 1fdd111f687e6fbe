"""Trainer and server see the same pixels: stored images are decoded by this project and by vLLM."""

from __future__ import annotations

import io
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from armature.components.artifacts.images import ImageStore, decode, encode_png
from armature.components.contracts.images import EncodedImage
from tests.images import (
    MEDIA_TYPES,
    encoded,
    every_image,
    exif,
    other_images,
    pillow_images,
    plain_images,
    refused_images,
    scene,
    turned_images,
)
from tests.refusals import refused

Decoder = Callable[[bytes], np.ndarray]
VLLM = Path(__file__).parents[2] / ".venv-vllm/bin/python"
# vLLM decodes these originals differently: 16-bit gray as white, and a PNG's transparent color as opaque.
DECODED_DIFFERENTLY = ("I;16", "16-bit gray", "RGB, one transparent", "gray 2-bit, one", "gray 4-bit, one")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """Return a function that decodes the bytes of an image to pixels with vLLM's code. All tests share one process."""
    if not VLLM.exists():
        pytest.skip("needs the environment .venv-vllm")
    file = tmp_path_factory.mktemp("server") / "image"
    command = [VLLM, Path(__file__).with_name("vllm_pixels.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin and process.stdout
        lines = process.stdout
        while lines.readline().strip() != "ready":
            assert process.poll() is None

        def pixels(data: bytes) -> np.ndarray:
            assert process.stdin
            file.write_bytes(data)
            process.stdin.write(f"{file}\n")
            process.stdin.flush()
            answer = lines.readline()
            assert answer.startswith("("), answer
            return np.load(f"{file}.npy")

        yield pixels
        process.stdin.close()


def pixels_on_both_sides(store: ImageStore, server: Decoder, image: EncodedImage) -> np.ndarray:
    """Store an image, check that trainer and server decode it to the same pixels, and return the pixels."""
    ref = store.put(image)
    ours = np.asarray(store.open(ref))
    assert ours.shape == (ref.height, ref.width, 3) and ours.dtype == np.uint8
    assert np.array_equal(server(store.read(ref)), ours)
    return ours


@pytest.mark.parametrize("name", every_image())
def test_server_decodes_stored_images_to_the_same_pixels(name: str, store: ImageStore, server: Decoder) -> None:
    image = every_image()[name]
    ours = pixels_on_both_sides(store, server, image)
    if not any(part in name for part in DECODED_DIFFERENTLY):
        assert np.array_equal(server(image.data), ours)


@st.composite
def images(draw: st.DrawFn) -> EncodedImage:
    modes = {
        "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "P, alpha by color"),
        "JPEG": ("L", "RGB", "CMYK"),
        "WEBP": ("L", "P", "RGB", "RGBA"),
    }
    kind = draw(st.sampled_from(sorted(modes)))
    mode = draw(st.sampled_from(modes[kind]))
    size = draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    image = pillow_images()[mode].resize(size, Image.Resampling.NEAREST)
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        tags = bytearray(exif(draw(st.integers(0, 10))).tobytes())
        if draw(st.booleans()):
            tags[draw(st.integers(6, len(tags) - 1))] = draw(st.integers(0, 255))
        options["exif"] = bytes(tags)
    if kind == "JPEG":
        options["progressive"] = draw(st.booleans())
    if kind == "WEBP":
        options["lossless"] = draw(st.booleans())
    if kind == "PNG" and mode in ("L", "P") and draw(st.booleans()):
        options["transparency"] = draw(st.integers(0, 63))
    return encoded(image, kind, **options)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(image=images())
def test_server_agrees_on_random_modes_orientations_and_formats(
    image: EncodedImage, server: Decoder, tmp_path: Path
) -> None:
    pixels_on_both_sides(ImageStore(tmp_path), server, image)


@pytest.mark.parametrize("name", plain_images())
def test_plain_images_keep_their_bytes(name: str, store: ImageStore) -> None:
    image = plain_images()[name]
    ref = store.put(image)
    assert (ref.sha256, ref.media_type) == (image.sha256, image.media_type)
    assert store.read(ref) == image.data


@pytest.mark.parametrize("name", (turned_images() | other_images()))
def test_other_images_are_stored_as_plain_rgb_png(name: str, store: ImageStore) -> None:
    ref = store.put(every_image()[name])
    with Image.open(store.path(ref)) as stored:
        assert ref.media_type == "image/png" == Image.MIME[str(stored.format)]
        assert stored.mode == "RGB" and stored.size == (ref.width, ref.height)
        assert not stored.has_transparency_data and not stored.getexif()
    again = store.put(EncodedImage(store.read(ref), ref.media_type))
    assert again == ref


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_exif_orientations_follow_the_standard(kind: str, number: int, store: ImageStore) -> None:
    upright = pillow_images()["RGB"]
    undo = {5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE}
    undo |= {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    undo |= {8: Image.Transpose.ROTATE_270}
    saved = upright.transpose(undo[number]) if number > 1 else upright
    ref = store.put(encoded(saved, kind, exif=exif(number)))
    assert (ref.width, ref.height) == upright.size
    assert np.array_equal(np.asarray(store.open(ref)), np.asarray(upright))


@pytest.mark.parametrize("kind", MEDIA_TYPES)
def test_orientation_is_read_despite_a_damaged_tag(kind: str) -> None:
    make, orientation = struct.pack("<HHII", 0x10F, 2, 100, 9999), struct.pack("<HHIHH", 0x112, 3, 1, 6, 0)
    tags = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + make + orientation + bytes(4)
    image = pillow_images()["RGB"]
    shown = decode(encoded(image, kind, exif=tags))
    assert np.array_equal(shown, decode(encoded(image, kind)).transpose(Image.Transpose.ROTATE_270))


def test_transparency_is_composited_on_white(store: ImageStore) -> None:
    colors, alpha = scene()[..., :3].astype(float), scene()[..., 3:] / 255
    expected = colors * alpha + 255 * (1 - alpha)
    for image in (encoded(Image.fromarray(scene()), "PNG"), encode_png(Image.fromarray(scene()))):
        assert np.abs(np.asarray(store.open(store.put(image))) - expected).max() <= 1


def test_transparent_color_becomes_white() -> None:
    shown = np.asarray(decode(other_images()["PNG gray 4-bit, one transparent"]))[..., 0]
    levels = (scene()[..., 2] >> 4) * 17
    assert np.array_equal(shown, np.where(levels == 17, 255, levels))
    deep = np.asarray(decode(other_images()["PNG 16-bit gray, one transparent"]))[..., 0]
    assert np.array_equal(deep, np.where(scene()[..., 2] < 128, scene()[..., 2], 255))


def test_16_bit_gray_keeps_its_high_byte() -> None:
    assert np.array_equal(np.asarray(decode(other_images()["PNG I;16"]))[..., 0], scene()[..., 2])
    deep = Image.fromarray(np.arange(65536, dtype=np.uint16).reshape(256, 256))
    assert np.array_equal(np.asarray(decode(encode_png(deep)))[..., 1], np.arange(65536).reshape(256, 256) // 256)


@pytest.mark.parametrize("name", pillow_images())
def test_encode_png_accepts_every_pillow_mode(name: str) -> None:
    image = pillow_images()[name]
    shown = np.asarray(decode(encode_png(image))).astype(int)
    assert shown.shape == (image.height, image.width, 3)
    if name in ("LA", "La", "RGBA", "RGBa"):
        assert shown[scene()[..., 3] == 0].min() >= 254
    if name in ("RGBX", "CMYK", "HSV", "YCbCr", "LAB"):
        assert np.abs(shown - scene()[..., :3]).mean() < 6


@pytest.mark.parametrize("mode", ["I", "F"])
def test_rejects_empty_images_and_modes_without_a_value_range(mode: str) -> None:
    with refused("image_mode_unsupported", mode):
        encode_png(pillow_images()["L"].convert(mode))
    with refused("image_empty"):
        encode_png(Image.new("RGB", (0, 3)))


def test_encode_png_applies_exif_orientation() -> None:
    with Image.open(io.BytesIO(turned_images()["JPEG RGB EXIF 6"].data)) as opened:
        shown = decode(encode_png(opened))
    assert shown.size == (opened.height, opened.width)
    assert np.array_equal(shown, decode(turned_images()["JPEG RGB EXIF 6"]))


@pytest.mark.parametrize("name", refused_images())
def test_rejects_unsupported_images(name: str, store: ImageStore) -> None:
    image, code = refused_images()[name]
    with refused(code):
        store.put(image)
    assert not store.root.exists()
