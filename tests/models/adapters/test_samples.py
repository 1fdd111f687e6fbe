"""Turning rollouts into samples: which tokens are trained, which turns are merged, which are dropped."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.rollouts import Trajectory
from armature.components.models.adapters import get_adapter
from armature.components.models.adapters.sequences import merge_turns, runs_fit, sample_of
from armature.components.vlm.packing import shared_prefix
from tests.refusals import refused

from .conftest import outputs_of, says, turn_of

PROMPT, ANSWER = [20, 21, 22, 23], [30, 31, 1]


@pytest.mark.parametrize(
    ("reason", "prompt", "completion", "logprobs"),
    [
        ("empty_prompt", [], [30, 31], [-0.1, -0.2]),
        ("empty_completion", PROMPT, [], []),
        ("logprobs_missing", PROMPT, [30, 31], []),
        ("logprobs_length", PROMPT, [30, 31], [-0.1]),
        ("logprobs_length", PROMPT, [30, 31], [-0.1, -0.2, -0.3]),
        ("logprobs_not_finite", PROMPT, [30, 31], [-0.1, np.nan]),
        ("logprobs_not_finite", PROMPT, [30, 31], [-np.inf, -0.1]),
        ("logprobs_not_finite", PROMPT, [30, 31], [np.inf, -0.1]),
        ("logprobs_positive", PROMPT, [30, 31], [-0.1, 0.01]),
        ("placeholder_sampled", PROMPT, [30, 6], [-0.1, -0.1]),
        ("too_long", PROMPT, [30] * 13, [-0.1] * 13),
    ],
)
def test_defective_turn_is_dropped_and_counted(qwen, reason, prompt, completion, logprobs):
    adapter = get_adapter(qwen.folder, qwen.processor, max_tokens=16)
    bad, good = turn_of(prompt, completion, logprobs), turn_of(PROMPT, ANSWER, [-0.5, 0.0, -9.0])
    samples, drops = adapter.samples(outputs_of([good], [bad], [good]))
    assert drops == {reason: 1}
    assert [sample.trajectory_id for sample in samples] == ["t0", "t2"]


def test_trajectory_with_nan_reward_is_dropped(qwen):
    bad = [turn_of(PROMPT, ANSWER, reward=1.0), turn_of(PROMPT, ANSWER, reward=float("nan"))]
    samples, drops = qwen.adapter.samples(outputs_of(bad, [turn_of(PROMPT, ANSWER)]))
    assert drops == {"reward_not_finite": 2}
    assert len(samples) == 1


def test_turns_with_missing_damaged_or_rejected_images_are_dropped(qwen):
    good = qwen.turn([says(None, "What color?")], [qwen.image(100, 80)], "red")
    thin = qwen.image(1, 300)  # the processor rejects aspect ratios above 200
    damaged = ImageRef("d" * 64, "image/png", 100, 80)

    def source(ref: ImageRef) -> Image.Image:
        if ref == damaged:
            raise DataError("the image is damaged")
        return qwen.images[ref]

    bad = [
        turn_of(good.prompt_token_ids, ANSWER, images=(ref,))
        for ref in (ImageRef("a" * 64, "image/png", 100, 80), damaged, thin)
    ]
    adapter = get_adapter(qwen.folder, qwen.processor, source)
    samples, drops = adapter.samples(outputs_of(bad, [good]))
    assert drops == {"image_missing": 1, "image_unreadable": 1, "image_unprocessable": 1}
    assert len(samples) == 1


def test_swapped_images_are_a_placeholder_mismatch(qwen):
    images = (qwen.image(100, 80), qwen.image(64, 150))
    good = qwen.turn([says(None, "or", None)], images, "red")
    swapped = turn_of(good.prompt_token_ids, ANSWER, images=images[::-1])
    samples, drops = qwen.adapter.samples(outputs_of([swapped], [good]))
    assert drops == {"placeholder_mismatch": 1}
    assert len(samples) == 1


def test_rejects_rollouts_with_images_without_an_image_source(qwen):
    turn = qwen.turn([says(None, "What color?")], [qwen.image(100, 80)], "red")
    with refused("image_store_missing"):
        get_adapter(qwen.folder, qwen.processor).samples(outputs_of([turn]))


def test_template_words_in_a_completion_do_not_move_the_loss_mask(qwen):
    for text in ("assistant", "<|im_start|>assistant\nred", "red<|im_end|>\n<|im_start|>user\n"):
        turn = qwen.turn([says("Say: assistant")], [], text)
        (sample,), _ = qwen.adapter.samples(outputs_of([turn]))
        assert sample.loss_mask.tolist() == [False] * len(turn.prompt_token_ids) + [True] * len(
            turn.completion_token_ids
        )


def test_turns_merge_only_on_an_exact_prefix():
    first = turn_of(PROMPT, ANSWER)
    same = turn_of([*PROMPT, *ANSWER, 40, 41], ANSWER, index=1)
    drifted = turn_of([*PROMPT, 30, 99, 1, 40, 41], ANSWER, index=1)
    shorter = turn_of([*PROMPT, 30], ANSWER, index=1)
    assert merge_turns([first, same], True) == [[first, same]]
    assert merge_turns([first, same], False) == [[first], [same]]
    for other in (drifted, shorter):
        assert merge_turns([first, other], True) == [[first], [other]]


THINKING = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'].split('</think>')[-1] }}{%- else -%}"
    "{%- for part in message['content'] -%}{{ part['text'] or '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>' }}{%- endif -%}"
)
"""Chat template that removes the thinking of earlier turns, as those of Qwen3 and Qwen3.5 do."""


def test_turns_without_earlier_thinking_are_samples_of_their_own(qwen, monkeypatch):
    monkeypatch.setattr(qwen.processor, "chat_template", THINKING)
    image, question, answer = qwen.image(100, 80), says(None, "What color?"), "it is bright</think>red"
    first = qwen.turn([question], [image], answer)
    chat = [question, {"role": "assistant", "content": answer}, says("Sure?")]
    second = qwen.turn(chat, [image], "no doubt</think>yes", index=1)
    samples, drops = qwen.adapter.samples(outputs_of([first, second]))
    assert not drops and len(samples) == 2
    for sample, turn in zip(samples, (first, second), strict=True):
        assert sample.input_ids.tolist() == [*turn.prompt_token_ids, *turn.completion_token_ids]
        assert np.flatnonzero(sample.loss_mask)[0] == len(turn.prompt_token_ids)
        assert sample.loss_mask.sum() == len(turn.completion_token_ids)
    common = shared_prefix(samples[0].input_ids, samples[1].input_ids)  # computed once in packed rows
    assert (
        np.flatnonzero(samples[0].input_ids == qwen.collator.image_token_id)[-1] < common < len(first.prompt_token_ids)
    )


def test_turns_merge_only_if_images_extend():
    red, blue = (ImageRef(letter * 64, "image/png", 8, 8) for letter in "ab")
    first = turn_of(PROMPT, ANSWER, images=(red,))
    longer = [*PROMPT, *ANSWER, 40]
    extended, changed = (turn_of(longer, ANSWER, index=1, images=images) for images in ((red, blue), (blue,)))
    assert merge_turns([first, extended], True) == [[first, extended]]
    assert merge_turns([first, changed], True) == [[first], [changed]]


def test_turn_extends_the_newest_matching_sequence():
    first = turn_of(PROMPT, ANSWER)
    aside = turn_of([50, 51], [52, 1], index=1)
    resumed = turn_of([*PROMPT, *ANSWER, 40], ANSWER, index=2)
    assert merge_turns([first, aside, resumed], True) == [[first, resumed], [aside]]


def test_dropped_turn_remains_context_of_a_later_one(qwen):
    first = turn_of(PROMPT, ANSWER, policy_version=1)
    lost = turn_of([*PROMPT, *ANSWER, 40], [33, 1], [np.nan, -1.0], index=1)
    last = turn_of([*PROMPT, *ANSWER, 40, 33, 1, 41], [34, 1], index=2, policy_version=2)
    (sample,), drops = qwen.adapter.samples(outputs_of([first, lost, last]))
    assert drops == {"logprobs_not_finite": 1}
    assert sample.sample_id == "t0/0-2"
    assert sample.input_ids.tolist() == [*PROMPT, *ANSWER, 40, 33, 1, 41, 34, 1]
    assert np.flatnonzero(sample.loss_mask).tolist() == [4, 5, 6, 11, 12]
    assert sample.policy_versions.tolist() == [-1] * 4 + [1] * 3 + [-1] * 4 + [2] * 2


def test_merged_turns_keep_their_own_advantages(qwen):
    first = turn_of(PROMPT, ANSWER)
    lost = turn_of([*PROMPT, *ANSWER, 40], [33, 1], [np.nan, -1.0], index=1)
    last = turn_of([*PROMPT, *ANSWER, 40, 33, 1, 41], [34, 1], index=2)
    outputs = outputs_of([first, lost, last], [first])
    advantages = {("t0", 0): 0.5, ("t0", 1): 9.0, ("t0", 2): -2.0, ("t1", 0): 0.25}
    (merged, alone), _ = qwen.adapter.samples(outputs, advantages)
    assert merged.advantages.tolist() == [0] * 4 + [0.5] * 3 + [0] * 4 + [-2.0] * 2
    assert alone.advantages.tolist() == [0] * 4 + [0.25] * 3
    batch = qwen.collate([merged, alone])
    assert batch.advantages[0].tolist() == merged.advantages.tolist()
    assert not any(sample.advantages.any() for sample in qwen.adapter.samples(outputs)[0])


def test_long_sequence_is_cut_between_turns(qwen):
    first = turn_of(PROMPT, ANSWER)
    second = turn_of([*PROMPT, *ANSWER, 40], ANSWER, index=1)
    for limit, lengths in ((7, [7]), (10, [7]), (11, [11])):
        adapter = get_adapter(qwen.folder, qwen.processor, max_tokens=limit)
        samples, _ = adapter.samples(outputs_of([first, second]))
        assert [len(sample.input_ids) for sample in samples] == lengths


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[float]]]:
    """Draw the turns of an episode; a turn has prompt ids, completion ids and log-probs. A prompt begins with all
    tokens of an earlier turn, or starts a new sequence."""
    tokens = st.lists(st.integers(20, 24), min_size=1, max_size=5)
    turns: list[tuple[list[int], list[int], list[float]]] = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.sampled_from([[], *(prompt + completion for prompt, completion, _ in turns)]))
        completion = draw(tokens)
        logprobs = draw(st.lists(st.floats(-20, 0, width=32), min_size=len(completion), max_size=len(completion)))
        turns.append((start + draw(tokens), completion, logprobs))
    return turns


@settings(max_examples=150)
@given(episode=episodes())
def test_every_sampled_token_is_trained_once_with_its_logprob(episode):
    turns = [turn_of(*parts, index=index, policy_version=index) for index, parts in enumerate(episode)]
    groups = merge_turns(turns, True)
    assert sorted(turn.index for group in groups for turn in group) == list(range(len(turns)))
    for group in groups:
        sample = sample_of(_trajectory(turns), group)
        sampled = np.concatenate([turn.completion_token_ids for turn in group])
        assert sample.loss_mask.sum() == len(sampled)
        assert np.array_equal(sample.input_ids[sample.loss_mask], sampled)
        assert np.array_equal(
            sample.behavior_logprobs[sample.loss_mask], np.concatenate([turn.completion_logprobs for turn in group])
        )
        assert not sample.behavior_logprobs[~sample.loss_mask].any()
        for turn in group:
            end = len(turn.prompt_token_ids)
            assert np.array_equal(sample.input_ids[:end], turn.prompt_token_ids)
            assert (sample.policy_versions[end : end + len(turn.completion_token_ids)] == turn.index).all()


@given(runs=st.lists(st.integers(1, 4), max_size=4), gaps=st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_runs_fit_only_if_runs_are_exact(runs, gaps):
    ids = [0] * gaps[-1]
    for run, gap in zip(runs, gaps, strict=False):
        ids += [7] * run + [0] * gap
    assert runs_fit(np.array(ids, dtype=np.int32), 7, runs)
    assert not runs_fit(np.array([*ids, 7], dtype=np.int32), 7, runs)
    if runs and runs[0] > 1:
        broken = ids.copy()
        broken.insert(ids.index(7) + 1, 0)
        assert not runs_fit(np.array(broken, dtype=np.int32), 7, runs)


def test_build_batch_has_no_advantages_and_reports_drops(qwen, caplog):
    outputs = outputs_of([turn_of(PROMPT, ANSWER, reward=1.0)], [turn_of(PROMPT, [30, 6])], [turn_of([20], [1])])
    with caplog.at_level(logging.WARNING):
        batch = qwen.adapter.build_batch(outputs)
    assert "placeholder_sampled" in caplog.text
    assert batch.advantages is None
    assert batch.rewards.tolist() == [1.0, 0.5]
    assert batch.pixel_values is None
    assert batch.loss_mask.tolist() == [[False] * 4 + [True] * 3, [False, True] + [False] * 5]
    assert batch.attention_mask.sum(1).tolist() == [7, 2]
    assert torch.equal(batch.behavior_logprobs != 0, batch.loss_mask)
    with refused("no_trainable_turn", {"empty_completion": 1}):
        qwen.adapter.build_batch(outputs_of([turn_of(PROMPT, [])]))


def test_distinct_image_is_processed_once_per_batch(qwen):
    image, other = qwen.image(100, 80), qwen.image(64, 150)
    turns = [qwen.turn([says(None, None, "?")], [image, other], "red"), qwen.turn([says(None)], [image], "red")]
    samples, _ = qwen.adapter.samples(outputs_of(*([turn] for turn in turns)))
    opened: list[ImageRef] = []

    def source(ref: ImageRef) -> Image.Image:
        opened.append(ref)
        return qwen.images[ref]

    qwen.collator.collate(samples, source)
    assert opened == [image, other]


def _trajectory(turns: Any) -> Trajectory:
    return Trajectory("t", "g", "colors", "task", "train", tuple(turns), False)
