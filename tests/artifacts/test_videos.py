"""Videos: frames are chosen once, kept exactly with their times, and damaged or hostile files are refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from armature.components.artifacts import videos
from armature.components.artifacts.images import ImageStore, decode, encode_png
from armature.components.artifacts.videos import FrameSettings, decode_video, encode_video, is_video, read_video
from armature.components.contracts.images import VIDEO, EncodedImage
from tests.images import noise
from tests.refusals import refused

SERVED = Path(__file__).parents[2] / "components/inference/served"


def file_of(count: int, fps: int, size: tuple[int, int] = (96, 64), rotation: int = 0) -> bytes:
    """Return an MP4 of gray frames, number k with the value 8 * k, in which frames refer to later ones."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "1", "bf": "2"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(count):
            gray = np.full((size[1], size[0], 3), 8 * number % 256, dtype=np.uint8)
            gray[: size[1] // 2, :8] = 255 - gray[0, 0]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def numbers(video: EncodedImage) -> list[int]:
    """Return the numbers of the frames of `file_of` that a video shows."""
    return [round(float(np.asarray(frame)[-8:, -8:].mean()) / 8) for frame in decode_video(video).frames]


@pytest.mark.parametrize(
    "frames",
    [[noise(0)], [noise(0)] * 3, [noise(0), noise(1), noise(1), noise(0)], [noise(seed, 31, 17) for seed in range(9)]],
    ids=["one", "equal frames", "repeated frames", "odd sizes"],
)
def test_stored_video_has_the_exact_frames_and_times(frames, tmp_path):
    times = [0.1 + 0.37 * number**1.5 for number in range(len(frames))]
    store = ImageStore(tmp_path)
    ref = store.put(encode_video(frames, times))
    assert (ref.media_type, ref.width, ref.height) == (VIDEO, *frames[0].size)
    opened = store.open(ref)
    assert opened.times == tuple(times)
    assert all(np.array_equal(one, other) for one, other in zip(opened.frames, frames, strict=True))
    assert np.array_equal(decode(EncodedImage(store.read(ref), VIDEO)), frames[0])


def test_server_and_trainer_get_the_same_frames_and_times(tmp_path):
    """The plug-in has code of its own, since it imports no other package of Armature."""
    video = encode_video([noise(seed) for seed in range(5)], [1.0, 1.3, 1.9, 2.0, 7.0])
    tmp_path.joinpath("video").write_bytes(video.data)
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from armature_served.videos import frames_of;"
        "frames, facts = frames_of(open(sys.argv[2], 'rb').read()); print(json.dumps([frames.tolist(), facts]))"
    )
    made = subprocess.run([sys.executable, "-c", program, SERVED, tmp_path / "video"], stdout=-1, check=True)
    frames, facts = json.loads(made.stdout)
    opened = decode_video(video)
    assert np.array_equal(frames, np.stack([np.asarray(frame) for frame in opened.frames]))
    assert opened.metadata.items() <= facts.items()
    assert not facts["do_sample_frames"]
    assert [number / facts["fps"] for number in facts["frames_indices"]] == pytest.approx(opened.times)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        (FrameSettings(fps=2), [0, 5, 10, 15]),
        (FrameSettings(fps=10, most=4), [0, 6, 13, 19]),
        (FrameSettings(fps=100), [*range(20)]),
        (FrameSettings(fps=0.1), [0, 19]),
        (FrameSettings(most=1), [0]),
    ],
    ids=["by rate", "at most four", "faster than the file", "slower than the file", "one"],
)
def test_frames_of_a_file_are_chosen_by_rate_and_number(settings, chosen, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(file_of(20, fps=10))
    for source in (path, path.read_bytes()):
        made = read_video(source, settings)
        assert numbers(made) == chosen
        assert decode_video(made).times == pytest.approx([number / 10 for number in chosen])


def test_frames_are_scaled_down_and_animations_are_read():
    made = decode_video(read_video(file_of(4, fps=2, size=(128, 64)), FrameSettings(pixels=28 * 28)))
    assert made.size == (39, 19)
    gif = io.BytesIO()
    first, *others = (noise(seed) for seed in range(4))
    first.save(gif, "GIF", save_all=True, append_images=others, duration=500)
    assert is_video(gif.getvalue())
    assert decode_video(read_video(gif.getvalue())).times == (0.0, 0.5, 1.0, 1.5)


@pytest.mark.parametrize(
    ("frames", "times"),
    [
        ([], []),
        ([noise(0)], [0.0, 1.0]),
        ([noise(0), noise(1, 28)], [0.0, 1.0]),
        ([noise(0), noise(1)], [1.0, 1.0]),
        ([noise(0), noise(1)], [0.0, float("nan")]),
        ([noise(0).convert("L")], [0.0]),
    ],
    ids=["none", "more times", "two sizes", "equal times", "NaN", "gray"],
)
def test_rejects_frames_that_are_not_a_video(frames, times):
    with refused("video_frames_invalid"):
        encode_video(frames, times)


def test_rejects_damaged_and_hostile_videos(tmp_path, monkeypatch):
    store, whole = ImageStore(tmp_path), encode_video([noise(0), noise(1)], [0.0, 1.0])
    with refused("foreign_file_unreadable"):
        store.put(EncodedImage(whole.data[: len(whole.data) // 2], VIDEO))
    with refused("video_unreadable"):
        store.put(EncodedImage(encode_png(noise(0)).data, VIDEO))
    with refused("image_animated"):
        store.put(EncodedImage(whole.data, "image/png"))
    with refused("image_too_large"):
        store.put(encode_video([Image.new("RGB", (4000, 4000))] * 5, range(5)))
    for data in (b"", b"\0" * 999, file_of(8, fps=2)[:900]):
        with refused("foreign_file_unreadable"):
            read_video(data)
    for name in ("MAX_FILE_BYTES", "MAX_FILE_FRAMES", "MAX_FRAME_PIXELS"):
        with monkeypatch.context() as patch, refused("video_too_large"):
            patch.setattr(videos, name, 3)
            read_video(file_of(8, fps=2))
