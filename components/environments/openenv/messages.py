"""Turn an observation's fields into text and images for the policy, and the policy's answer into an action's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from armature.components.artifacts.images import encode_png
from armature.components.contracts.episodes import Observation
from armature.components.contracts.errors import RolloutFailed
from armature.components.contracts.images import EncodedImage
from armature.components.environments.dataset.bad_rows import BadRow
from armature.components.environments.dataset.images import encoded_image, from_base64
from armature.components.environments.dataset.template import Place, parse_template
from armature.components.environments.openenv.settings import COMPLETION, OpenEnvSettings
from armature.components.rewards.reward import extracted

DEEPEST = 8
"""Largest number of levels of nested objects in an observation whose fields a prompt can name."""


class NoAction(Exception):
    """An answer that does not contain an action."""


def to_observation(fields: Mapping[str, Any], settings: OpenEnvSettings) -> Observation:
    """Return the fields of a server's observation as an observation for the policy.

    Raises:
        RolloutFailed: a field that `prompt` or `images` names is missing or has another type (`environment_error`), or
            a field that should be an image is not one (`bad_image`).
    """
    named = dict(flattened(fields))
    missing = [name for name in settings.images if name not in named]
    if missing:
        raise RolloutFailed("environment_error", f"the observation has no {missing[0]!r}, but {sorted(named)[:20]}")
    images = [read_image(name, named[name]) for name in settings.images if named[name] is not None]
    if not settings.prompt:
        rest = {name: value for name, value in fields.items() if name not in settings.images and name != "metadata"}
        return Observation((*images, json.dumps(rest, ensure_ascii=False)))
    return Observation(filled_prompt(settings.prompt, named, images))


def filled_prompt(
    prompt: str, named: Mapping[str, Any], images: Sequence[EncodedImage]
) -> tuple[str | EncodedImage, ...]:
    """Return the texts and images of a prompt whose places are filled with an observation's fields and its images.

    Raises:
        RolloutFailed: a field is missing or has another type, or there are more images than places
            (`environment_error`).
    """
    try:
        filled = parse_template(prompt).fill(named)
    except BadRow as error:
        raise RolloutFailed(
            "environment_error", f"the observation does not fill the prompt: {error}; it has {sorted(named)[:20]}"
        ) from error
    content: list[str | EncodedImage] = []
    left = list(images)
    for part in filled:
        if isinstance(part, str):
            content.append(part)
        else:
            count = len(left) if part is Place.IMAGES else 1
            content += left[:count]
            del left[:count]
    if left:
        raise RolloutFailed("environment_error", f"the prompt has too few places for images: {len(left)} are left")
    return tuple(content)


def action_of(completion: str, settings: OpenEnvSettings) -> dict[str, Any]:
    """Return the fields of the action that a completion contains.

    Raises:
        NoAction: the part that `extract` names is missing or holds no JSON object, or a value in the object cannot be
            encoded as JSON in UTF-8, such as NaN or an unpaired surrogate.
    """
    text = extracted(completion, settings.extract)
    if text is None:
        raise NoAction
    fields = _with_completion(settings.action, text) if isinstance(settings.action, dict) else last_object(text)
    try:
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise NoAction from error
    assert isinstance(fields, dict)
    return fields


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text; text before and after it is ignored.

    Raises:
        NoAction: the text has no JSON object.

    Example:
        >>> last_object('{"move": 1} or better: {"move": {"x": 2}}.')
        {'move': {'x': 2}}
    """
    end = text.rfind("}") + 1
    decoder = json.JSONDecoder(parse_constant=_refuse)
    start, attempts = text.find("{"), 0
    while 0 <= start < end and attempts < 100:
        try:
            value, stop = decoder.raw_decode(text[:end], start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            attempts += 1
            continue
        if stop == end and isinstance(value, dict):
            return value
        start = text.find("{", stop)
    raise NoAction


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _with_completion(value: Any, completion: str) -> Any:
    if isinstance(value, str):
        return value.replace(COMPLETION, completion)
    if isinstance(value, dict):
        return {key: _with_completion(item, completion) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_completion(item, completion) for item in value]
    return value


def flattened(fields: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield all fields by their names; a field of a table has a name such as "metadata.hint"."""
    for name, value in fields.items():
        yield prefix + name, value
        if isinstance(value, dict) and depth < DEEPEST:
            yield from flattened(value, f"{prefix}{name}.", depth + 1)


def read_image(name: str, value: Any) -> EncodedImage:
    """Return the image that a field holds: a data URL, base64, or rows of pixels.

    Raises:
        RolloutFailed: the field holds no image (`bad_image`).
    """
    try:
        if isinstance(value, str):
            if value.startswith("data:"):
                return EncodedImage.from_url(value)
            return encoded_image(from_base64(value, name), name)
        pixels = np.asarray(value)
        if pixels.dtype.kind not in "iu" or pixels.min() < 0 or pixels.max() > 255:
            raise ValueError("pixels are whole numbers from 0 to 255")
        return encode_png(Image.fromarray(pixels.astype(np.uint8)))
    except Exception as error:
        raise RolloutFailed("bad_image", f"{name!r} is not an image: {error}") from error
