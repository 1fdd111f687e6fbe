"""Images of a page: each embedded once, scaled down where large, and left out past a budget."""

from __future__ import annotations

from io import BytesIO
from typing import Protocol

from armature.components.artifacts.images import decode
from armature.components.contracts.images import EncodedImage, ImageRef, data_url


class ImageReader(Protocol):
    def read(self, ref: ImageRef, /) -> bytes: ...


class EmbeddedImages:
    """`images` maps a key (the start of the image's SHA-256) to its data URI, size and original size."""

    def __init__(self, images: ImageReader, *, side: int, budget: int) -> None:
        self._images, self._side, self._left = images, side, budget
        self.images: dict[str, dict[str, object]] = {}
        self._left_out: set[str] = set()

    @property
    def omitted(self) -> int:
        """Distinct images that did not fit."""
        return len(self._left_out)

    def add(self, ref: ImageRef) -> str:
        """The key of the image, which is in `images` unless the budget was used up."""
        key = ref.sha256
        if key in self.images or key in self._left_out:
            return key
        if self._left <= 0:
            self._left_out.add(key)
            return key
        uri = data_url(*self._encode(ref))
        if len(uri) > self._left:
            self._left = 0
            self._left_out.add(key)
            return key
        self._left -= len(uri)
        self.images[key] = {"uri": uri, "width": ref.width, "height": ref.height}
        return key

    def _encode(self, ref: ImageRef) -> tuple[bytes, str]:
        image = EncodedImage(self._images.read(ref), ref.media_type)
        if max(ref.width, ref.height) <= self._side:
            return image.data, image.media_type
        small = decode(image)
        small.thumbnail((self._side, self._side))
        out = BytesIO()
        small.save(out, "WEBP", quality=80, method=4)
        return out.getvalue(), "image/webp"
