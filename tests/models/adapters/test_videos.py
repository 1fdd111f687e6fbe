"""Positions of videos, and what the collator makes of them."""

from __future__ import annotations

import pytest
import torch

from armature.components.artifacts.videos import decode_video
from armature.components.models.adapters.collate import PLACEHOLDER_RUNS, TIME_STEP, media_positions, video_arguments
from tests.images import noise
from tests.models.clips import clip
from tests.refusals import refused

from .conftest import build


def features(grid: tuple[int, int, int], runs: list[int], step: float | None = None) -> dict[str, torch.Tensor]:
    found = {"image_grid_thw": torch.tensor([grid]), PLACEHOLDER_RUNS: torch.tensor(runs)}
    return found if step is None else found | {TIME_STEP: torch.tensor(step, dtype=torch.float64)}


def test_text_after_a_long_video_goes_on_behind_its_last_frame():
    """Two texts, three groups of frames of 1 x 2 tokens that are 2.5 positions apart, and two texts: by hand."""
    shown = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 0]).bool()
    video = features((3, 2, 4), [6], step=2.5)
    assert media_positions(shown, [video]).tolist() == [
        [0, 1, 2, 2, 4, 4, 7, 7, 8, 9],
        [0, 1, 2, 2, 2, 2, 2, 2, 8, 9],
        [0, 1, 2, 3, 2, 3, 2, 3, 8, 9],
    ]


def test_groups_of_frames_that_text_separates_have_the_same_time():
    shown = torch.tensor([0, 1, 1, 0, 1, 1, 0]).bool()
    assert media_positions(shown, [features((2, 2, 4), [2, 2], step=1.0)]).tolist() == [
        [0, 1, 1, 3, 4, 4, 6],
        [0, 1, 1, 3, 4, 4, 6],
        [0, 1, 2, 3, 4, 5, 6],
    ]


@pytest.fixture(params=["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def tiny(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp("videos") / request.param)


@pytest.mark.parametrize(("gap", "equal"), [(0.1, True), (2.0, False)], ids=["short", "long"])
def test_positions_equal_transformers_but_after_long_videos_of_qwen2_5(tiny, gap, equal):
    """A long video is longer in time than in width and height."""
    collator, processor = tiny.collator, tiny.processor
    shown = [noise(0, 84, 56), decode_video(clip(6, gap)), noise(1, 56, 112)]
    text = "a<|vision_start|><|image_pad|><|vision_end|>b<|vision_start|><|video_pad|><|vision_end|>c<|image_pad|>d"
    found = [collator.process_image(one) for one in shown]

    inputs = processor(text=[text], images=[[shown[0], shown[2]]], return_tensors="pt", **video_arguments([shown[1]]))
    ids = torch.from_numpy(collator.as_image_tokens(inputs["input_ids"][0].numpy()))
    arguments = {key: inputs[key] for key in ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")}
    if "second_per_grid_ts" in inputs:
        arguments["second_per_grid_ts"] = torch.as_tensor(inputs["second_per_grid_ts"])
    theirs, _ = tiny.model.model.get_rope_index(**arguments)
    ours = media_positions(ids == collator.image_token_id, found)
    assert torch.equal(ours, theirs[:, 0]) == (equal or tiny.family != "qwen2.5-vl")
    assert torch.equal(found[1]["pixel_values"], inputs["pixel_values_videos"])


def test_families_without_videos_refuse_them(tmp_path):
    tiny = build("llava", tmp_path / "llava")
    with refused("video_unsupported"):
        tiny.collator.process_image(decode_video(clip(2, 0.5)))
