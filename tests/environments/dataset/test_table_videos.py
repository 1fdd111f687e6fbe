"""Videos in the columns of a table: files, bytes, and frames with times."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.artifacts.images import encode_png
from armature.components.artifacts.videos import Video, decode_video
from armature.components.contracts.errors import RolloutFailed
from armature.components.environments.dataset.python_rows import write_rows
from tests.artifacts.test_videos import file_of, numbers
from tests.images import noise
from tests.refusals import refused

from .tables import environment_of, write_jsonl
from .test_rows import made

FRAMES = {"fps": 2.0, "most": 4}
TIMES = [0.0, 0.2, 0.5, 1.0, 1.5]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "clip.mp4").write_bytes(file_of(20, fps=10))
    for number in range(len(TIMES)):
        (tmp_path / f"frame{number}.png").write_bytes(encode_png(noise(number)).data)
    return tmp_path


def shown(folder: Path, video: Any, **changes: Any) -> Video:
    """Return the video that the environment shows for a row with `video` in the column v."""
    row = {"v": video, "q": "What moves?", "a": "left"}
    _, observation = made(folder, row, prompt="{image}{q}", images="v", frames=FRAMES, **changes)
    (clip, text) = observation.content
    assert text == "What moves?" and not isinstance(clip, str)
    return decode_video(clip)


@pytest.mark.parametrize("form", ["path", "base64"])
def test_file_of_a_row_becomes_its_chosen_frames(form, folder):
    data = b64encode((folder / "clip.mp4").read_bytes()).decode()
    video = shown(folder, "clip.mp4" if form == "path" else {"bytes": data, "path": None})
    assert video.times == (0.0, 0.5, 1.0, 1.5)


def test_frames_with_times_are_chosen_by_the_same_rule(folder):
    frames = [f"frame{number}.png" for number in range(len(TIMES))]
    video = shown(folder, {"frames": frames, "times": TIMES})
    assert video.times == (0.0, 0.5, 1.0, 1.5)
    assert all(np.array_equal(one, noise(number)) for one, number in zip(video.frames, (0, 2, 3, 4), strict=True))


def test_message_of_a_conversation_shows_a_video(folder):
    for kind in ("video", "video_url"):
        content = [{"type": kind, kind: "clip.mp4"}, {"type": "text", "text": "What moves?"}]
        row = {"chat": [{"role": "user", "content": content}], "a": "left"}
        _, observation = made(folder, row, conversation="chat", frames=FRAMES)
        assert numbers(observation.content[0]) == [0, 5, 10, 15]


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ("damaged.mp4", "bad_video"),
        ("gone.mp4", "no_image"),
        ({"frames": ["frame0.png", "gone.png"], "times": [0.0, 1.0]}, "no_image"),
        ({"frames": ["frame0.png"], "times": ["now"]}, "wrong_type"),
        ({"frames": [], "times": []}, "wrong_type"),
    ],
    ids=["damaged", "absent", "absent frame", "times", "no frames"],
)
def test_rows_with_bad_videos_are_counted_by_reason(video, reason, folder):
    (folder / "damaged.mp4").write_bytes(file_of(20, fps=10)[:900])
    with refused("rows_unusable", f"2 {reason}"):
        shown(folder, video)


def test_video_that_is_damaged_inside_costs_its_rollouts_alone(folder):
    """Before the start, files are opened and not decoded."""
    rows = [{"v": "clip.mp4", "a": "left", "s": split} for split in ("a", "b")]
    rows[0]["v"] = {"frames": ["frame0.png", "frame1.png"], "times": [1.0, 0.0]}
    write_jsonl(folder / "rows.jsonl", rows)
    split = {"by": "column", "column": "s", "train": "a", "heldout": "b"}
    args = {"prompt": "{image}", "images": "v", "answer": "a", "kind": "", "split": split}
    environment = environment_of({"source": str(folder / "rows.jsonl")}, **args)
    (task,) = environment.tasks("train")
    with refused("bad_video", kind=RolloutFailed):
        asyncio.run(environment.episode(task).reset())


def test_trainer_takes_rows_with_videos(folder, tmp_path):
    frames = [noise(number) for number in range(2)]
    rows = [
        {"prompt": "What moves?", "image": str(folder / "clip.mp4"), "answer": "left"},
        {"prompt": "What moves?", "image": {"frames": frames, "times": [0.0, 0.5]}, "answer": "left"},
    ]
    out = tmp_path / "written"
    out.mkdir()
    write_rows(rows, out, "train")
    files = [path.read_bytes() for path in out.rglob("images/*")]
    assert (folder / "clip.mp4").read_bytes() in files and len(files) == 3
