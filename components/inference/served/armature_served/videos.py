"""Make vLLM (0.32) read Armature's videos, and take videos of Qwen3-VL beside transformers 5.23.

A video is an animated PNG with a text `times`: the seconds of its frames, as JSON. vLLM's own ways to send frames lose
something: JPEG loses pixels, and their times are one setting for all videos of a request.
"""

from __future__ import annotations

import io
import json
from base64 import b64decode
from functools import wraps
from typing import Any


def read_animated_png() -> None:
    """Patch vLLM to load `data:image/apng` URLs as videos whose frames are not sampled again."""
    from vllm.multimodal.media.base import MediaWithBytes
    from vllm.multimodal.media.video import VideoMediaIO

    others = VideoMediaIO.load_base64
    if hasattr(others, "__wrapped__"):
        return

    @wraps(others)
    def load_base64(self: Any, media_type: str, data: str) -> Any:
        if media_type.lower() != "image/apng":
            return others(self, media_type, data)
        content = b64decode(data, validate=True)
        return MediaWithBytes(frames_of(content), content)

    VideoMediaIO.load_base64 = load_base64


def frames_of(content: bytes) -> tuple[Any, dict[str, Any]]:
    """Return the frames (T, H, W, 3) of an animated PNG, and what vLLM has to know of them.

    Raises:
        ValueError: it is another kind of file.
    """
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=["PNG"]) as opened:
        times, frames = json.loads(opened.info.get("times", "[]")), []
        if not times or len(times) != getattr(opened, "n_frames", 1):
            raise ValueError(f"not a video of Armature: {len(times)} times")
        for number in range(len(times)):
            opened.seek(number)
            frames.append(np.asarray(opened.convert("RGB")))
    seconds = times[-1] - times[0]
    fps = (len(times) - 1) / seconds if seconds else 1.0
    return np.stack(frames), {
        "total_num_frames": len(times),
        "fps": fps,
        "frames_indices": [time * fps for time in times],  # numbers such that number / fps is a time
        "duration": len(times) / fps,
        "video_backend": "armature",
        "do_sample_frames": False,
    }


def allow_text_of_videos() -> None:
    """Patch Qwen3-VL's processor to take text with a video's placeholder and no video.

    vLLM processes videos first, and then calls the processor with such a text, which transformers 5.23 refuses.
    """
    from transformers import Qwen3VLProcessor

    original = Qwen3VLProcessor.validate_inputs
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def validate_inputs(self: Any, images: Any = None, text: Any = None, videos: Any = None, **more: Any) -> None:
        if videos is None and text is not None:
            text = [one.replace(self.video_token, "") for one in ([text] if isinstance(text, str) else text)]
        original(self, images=images, text=text, videos=videos, **more)

    Qwen3VLProcessor.validate_inputs = validate_inputs
