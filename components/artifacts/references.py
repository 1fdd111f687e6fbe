"""Images that a dataset names: a data URL, a file under a root, or a web address when that is allowed."""

from __future__ import annotations

import base64
import binascii
import mimetypes
import time
from pathlib import Path

import httpx

from components.artifacts.images import FORMATS, MAX_BYTES
from components.contracts.errors import DataError
from components.contracts.images import EncodedImage

FETCH_SECONDS = 20.0


def load_reference(reference: str, root: Path | None = None, allow_urls: bool = False) -> EncodedImage:
    """The encoded image behind `reference`; its content is validated when it is put in the image store.

    Raises:
        DataError: outside `root`, of an unknown type, too large, too slow, or not allowed.
    """
    if reference.startswith("data:"):
        return _from_data_url(reference)
    if reference.startswith(("http://", "https://")):
        if not allow_urls:
            raise DataError(
                "web addresses of images are not allowed here",
                where=reference[:200],
                remedy="download the images first, or set allow_urls where the source is trusted",
            )
        return _from_web(reference)
    return _from_file(reference, root)


def _from_data_url(reference: str) -> EncodedImage:
    header, _, body = reference.partition(",")
    media_type = header.removeprefix("data:").partition(";")[0]
    if not header.endswith(";base64") or len(body) > MAX_BYTES * 4 // 3 + 4:
        raise DataError("the data URL is not base64 or is too large", where=header[:100])
    try:
        return EncodedImage(base64.b64decode(body, validate=True), media_type)
    except binascii.Error as error:
        raise DataError(f"the data URL is damaged: {error}", where=header[:100]) from error


def _from_file(reference: str, root: Path | None) -> EncodedImage:
    if root is None:
        raise DataError("image files need a root folder", where=reference, remedy="set the dataset's image root")
    path = (root / reference).resolve()
    if not path.is_relative_to(root.resolve()):
        raise DataError("the image lies outside its root", where=reference, remedy=f"keep images under {root}")
    if not path.is_file():
        raise DataError("no such image file", where=str(path))
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"the image file has more than {MAX_BYTES} bytes", where=str(path))
    media_type = mimetypes.guess_type(path.name)[0] or "unknown"
    if media_type not in FORMATS:
        raise DataError(f"images of type {media_type} are not supported", where=str(path))
    return EncodedImage(path.read_bytes(), media_type)


def _from_web(url: str) -> EncodedImage:
    deadline, parts, size = time.monotonic() + FETCH_SECONDS, [], 0
    try:
        with httpx.stream("GET", url, timeout=FETCH_SECONDS, follow_redirects=False) as response:
            response.raise_for_status()
            for part in response.iter_bytes():
                size += len(part)
                if size > MAX_BYTES:
                    raise DataError(f"the image has more than {MAX_BYTES} bytes", where=url)
                if time.monotonic() > deadline:
                    raise DataError(f"the image took longer than {FETCH_SECONDS:.0f} s", where=url)
                parts.append(part)
    except httpx.HTTPError as error:
        raise DataError(f"the image could not be fetched: {type(error).__name__} {error}", where=url) from error
    return EncodedImage(b"".join(parts), response.headers.get("content-type", "").partition(";")[0])
