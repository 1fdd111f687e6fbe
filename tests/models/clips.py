"""Short videos of noise that moves, and conversations with them."""

from __future__ import annotations

from typing import Any

from armature.components.artifacts.videos import encode_video
from armature.components.contracts.images import EncodedImage
from tests.images import image_part, noise


def clip(count: int, gap: float, start: float = 0.0, size: tuple[int, int] = (96, 64), seed: int = 0) -> EncodedImage:
    """Return a video of `count` frames, `gap` seconds apart, in which noise moves by 8 pixels a frame."""
    width, height = size
    wide = noise(seed, width // 8 + count, height // 8).resize((width + 8 * count, height))
    frames = [wide.crop((8 * at, 0, 8 * at + width, height)) for at in range(count)]
    return encode_video(frames, [start + gap * at for at in range(count)])


def video_part(video: EncodedImage) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": video.url}}


def asks(*parts: Any) -> dict[str, Any]:
    """Return a message of the user with texts, images of Pillow and videos."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append(video_part(part) if isinstance(part, EncodedImage) else image_part(part))
    return {"role": "user", "content": content}


def conversations() -> dict[str, list[dict[str, Any]]]:
    """Return conversations by name. Positions of Qwen2.5-VL in transformers are wrong after `slow` and `late`."""
    six, five = clip(6, 0.25), clip(5, 0.25, seed=1)
    slow, late = clip(6, 1.0, seed=2), clip(4, 0.75, start=3.0, seed=3)
    return {
        "six frames": [asks(six, "What moves?")],
        "five frames, the last one is repeated": [asks(five, "What moves?")],
        "one frame a second": [asks(slow, "What moves?")],
        "frames from 3 s on": [asks(late, "What moves?")],
        "frames at odd times": [asks(clip(5, 0.37, size=(64, 150), seed=4), "What moves?")],
        "an image and a video": [asks(noise(5, 64, 150), "then", six, "What moves?")],
        "two videos of two rates": [asks(slow, "or", five, "Which is faster?")],
        "two turns": [
            asks("Look:", slow),
            {"role": "assistant", "content": "red"},
            asks("and", noise(6, 100, 80), "and", late, "and", six),
        ],
    }
