"""Encoded examples, compared with the released prompt tokenized as one text; normalization of a task's text."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.processing.action_tokens import ActionTokens
from armature.components.robots.policies.molmoact2.processing.images import ImageLayout
from armature.components.robots.policies.molmoact2.processing.processor import (
    Processor,
    image_labels,
    normalize_language,
    sequence_budget,
    state_bins,
    wrap,
)
from armature.components.robots.policies.norm_stats import FeatureNormStats, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings
from tests.refusals import refused
from tests.robots.policies.plain import policy_settings

STATES, ACTIONS, CHUNK, HORIZON, WIDTH = 16, 90, 4, 6, 5
WORDS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<action_output>", "<setup_start>", "<setup_end>")
WORDS += ("<control_start>", "<control_end>", "<state_start>", "<state_end>", "<action_start>", "<action_end>")
WORDS += tuple(f"<state_{i}>" for i in range(STATES)) + tuple(f"<action_{i}>" for i in range(ACTIONS))
EXTRAS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
CAMERAS = ("observation.images.b", "observation.images.a")
LAYOUT = ImageLayout(side=42, patch=14, pool=2, columns=False)


def tokenizer(words: tuple[str, ...] = WORDS + EXTRAS, pad: str | None = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", pad_token=pad)


TOKENIZER = tokenizer()


def token(text: str) -> int:
    token_id = TOKENIZER.convert_tokens_to_ids(text)
    assert isinstance(token_id, int)
    return token_id


def config(**changes: Any) -> MolmoAct2Config:
    raw: dict[str, Any] = {
        "adapter_config": {"pooling_attention_mask": True},
        "text_config": {"use_qk_norm": True, "qk_norm_type": "qwen3", "num_hidden_layers": 2},
        "action_expert_config": {"num_layers": 2},
        "image_patch_id": token("<im_patch>"),
        "image_start_token_id": token("<im_start>"),
        "action_start_token_id": token("<action_start>"),
        "action_end_token_id": token("<action_end>"),
        "action_token_start_id": token("<action_0>"),
        "num_action_tokens": ACTIONS,
        "num_state_tokens": STATES,
        "eos_token_id": token("<|im_end|>"),
        "max_action_dim": WIDTH,
    }
    return MolmoAct2Config.from_dict(raw | changes)


def policy(**changes: Any) -> RobotPolicySettings:
    defaults: dict[str, Any] = {
        "action_mode": "both",
        "chunk_size": CHUNK,
        "n_action_steps": 2,
        "setup_type": "one arm",
        "control_mode": "joints",
        "image_keys": CAMERAS,
        "max_sequence_length": 1000,
    }
    return policy_settings(**(defaults | changes))


ROBOT = RobotMetadata(
    state_stats=FeatureNormStats(q01=(0.0, 0.0), q99=(15.0, 30.0), names=("a", "b")),
    action_stats=FeatureNormStats(q01=(-2.0, 0.0, 0.0), q99=(2.0, 4.0, 0.0), names=("a", "b", "gripper")),
)
RNG = np.random.default_rng(0)
OBSERVATION = RobotObservation(
    images={
        "observation.images.a": RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8),
        "observation.images.b": RNG.integers(0, 256, (42, 42, 3), dtype=np.uint8),
    },
    state=np.array([3, 30], np.float32),
    task="Task: Put <it> in the b\u00f6wl.",
)
DONE = np.stack([np.linspace(-2, 2, CHUNK), np.full(CHUNK, 1.0), [-1, -1, 1, 1]], axis=1)


@pytest.fixture(scope="module")
def fast() -> ActionTokens:
    return ActionTokens.fit([np.zeros((CHUNK, 3), np.float32)], vocabulary=ACTIONS, scale=10)


def build(settings: RobotPolicySettings, fast: ActionTokens | None, **changes: Any) -> Processor:
    parts: dict[str, Any] = {"config": config(), "tokenizer": TOKENIZER, "robot": ROBOT, "layout": LAYOUT}
    return Processor(settings=settings, action_tokens=fast, **(parts | changes))


def text(columns: str = "", images: tuple[str, ...] = ("Image 1", "Image 2")) -> str:
    """Return the released prompt as text. An image of 42 pixels has 3 x 3 patches, which are pooled to 2 x 2 tokens."""
    image = "<im_start>" + ("<im_patch><im_patch>" + columns) * 2 + "<im_end>"
    return (
        "<|im_end|>"
        + "".join(label + image for label in images)
        + "<|im_start|>user\nThe task is to put <it> in the b\u00f6wl. "
        + "The setup is <setup_start>one arm<setup_end>. "
        + "The current state of the robot is <state_start><state_3><state_15><state_end>. "
        + "The expected control mode is <control_start>joints<control_end>. "
        + "Given these, what action should the robot take to complete the task?<|im_end|>\n"
        + "<|im_start|>assistant\n<action_output>"
    )


def at_once(whole: str) -> list[int]:
    ids: list[int] = TOKENIZER(whole, add_special_tokens=False)["input_ids"]
    return ids


def test_prompt_equals_the_released_text(fast: ActionTokens) -> None:
    example = build(policy(), fast).encode(OBSERVATION)
    assert example.input_ids.tolist() == at_once(text())
    assert example.labels is None and example.actions is None
    images = {token(word) for word in EXTRAS[:4]}
    assert example.image_tokens.tolist() == [one in images for one in example.input_ids.tolist()]
    columns = ImageLayout(side=42, patch=14, pool=2, columns=True)
    one = build(policy(image_keys=CAMERAS[:1]), fast, layout=columns).encode(OBSERVATION)
    assert one.input_ids.tolist() == at_once(text("<im_col>", ("",)))


def test_images_are_in_the_order_of_image_keys(fast: ActionTokens) -> None:
    first, second = (LAYOUT.patchify([OBSERVATION.images[key]]) for key in CAMERAS)
    example = build(policy(), fast).encode(OBSERVATION)
    assert np.array_equal(example.pixel_values, np.concatenate([first, second]))
    assert example.pooling.tolist() == [
        *([0, 1, 3, 4], [2, -1, 5, -1], [6, 7, -1, -1], [8, -1, -1, -1]),
        *([9, 10, 12, 13], [11, -1, 14, -1], [15, 16, -1, -1], [17, -1, -1, -1]),
    ]
    unnamed = build(policy(image_keys=()), fast).encode(OBSERVATION)
    assert np.array_equal(unnamed.pixel_values, np.concatenate([second, first]))  # sorted
    from_tag = build(policy(image_keys=()), fast, robot=ROBOT.model_copy(update={"camera_keys": CAMERAS[:1]}))
    assert np.array_equal(from_tag.encode(OBSERVATION).pixel_values, first)


def test_actions_are_normalized_and_padded(fast: ActionTokens) -> None:
    example = build(policy(), fast, horizon=HORIZON).encode(OBSERVATION, DONE, padding=[False, False, False, True])
    assert example.actions is not None and example.actions.shape == (HORIZON, WIDTH)
    wanted = np.stack([np.linspace(-1, 1, CHUNK), np.full(CHUNK, -0.5), [-1, -1, 1, 1]], axis=1)
    assert np.allclose(example.actions[:CHUNK, :3], wanted, atol=1e-6)
    assert not example.actions[CHUNK:].any() and not example.actions[:, 3:].any()
    assert example.dimension_padding.tolist() == [False] * 3 + [True] * 2
    assert example.horizon_padding is not None and example.horizon_padding.tolist() == [False] * 4 + [True] * 2
    seed = build(policy(semantics="seed"), fast, horizon=HORIZON)
    masked = seed.encode(OBSERVATION, DONE, padding=[False, False, False, True]).horizon_padding
    assert masked is not None and masked.tolist() == [False] * 3 + [True] * 3


def test_action_tokens_are_labeled_and_decode_to_the_actions(fast: ActionTokens) -> None:
    processor = build(policy(), fast)
    example = processor.encode(OBSERVATION, DONE)
    prompt = at_once(text())
    assert example.labels is not None and example.actions is not None
    assert example.input_ids[: len(prompt)].tolist() == prompt
    answer = example.input_ids[len(prompt) :].tolist()
    assert example.labels.tolist() == [-100] * len(prompt) + answer
    spoken = "".join(f"<action_{one}>" for one in fast.encode(example.actions[:CHUNK, :3]))
    assert answer == at_once(f"<action_start>{spoken}<action_end><|im_end|>")
    decoded = processor.decode_tokens(answer)
    assert decoded.actions is not None
    # Half a rounding step for each of CHUNK coefficients, in units of q99 - q01 = 4 over the 2 of [-1, 1].
    assert np.abs(processor.decode(decoded.actions) - DONE).max() <= 0.05 * np.sqrt(CHUNK) * 2 + 1e-5
    assert build(policy(action_mode="continuous"), None).encode(OBSERVATION, DONE).labels is None


def test_undecodable_tokens_return_an_error(fast: ActionTokens) -> None:
    processor = build(policy(), fast)
    start, end = token("<action_start>"), token("<action_end>")
    for ids, words in (
        ([token("<|im_end|>")], "lack <action_start>"),
        ([start, token("<action_3>")], "or <action_end>"),
        ([start, end], "the tokens hold 0 coefficients, not 4 x 3"),
        ([start, token("<state_1>"), end], "action token -"),
        ([end, start], "0 coefficients"),
    ):
        answer = processor.decode_tokens(ids)
        assert answer.actions is None and answer.error is not None and words in answer.error


def test_decoded_actions_have_the_datasets_units(fast: ActionTokens) -> None:
    processor = build(policy(), fast, horizon=HORIZON)
    example = processor.encode(OBSERVATION, DONE)
    assert example.actions is not None
    back = processor.decode(example.actions)
    assert back.dtype == np.float32 and np.allclose(back, DONE, atol=1e-6)
    many = processor.decode(np.full((2, HORIZON, WIDTH), 9.0))
    assert many.shape == (2, CHUNK, 3) and many[1, 1].tolist() == [2, 4, 1]  # clipped to the ends


def test_encoding_has_no_state(fast: ActionTokens) -> None:
    used, fresh = build(policy(), fast), build(policy(), fast)
    used.encode(RobotObservation(OBSERVATION.images, np.zeros(2, np.float32), "Another"))
    examples = [each.encode(OBSERVATION, DONE) for each in (used, fresh, pickle.loads(pickle.dumps(used)))]
    for other in examples[1:]:
        for name, value in vars(examples[0]).items():
            assert np.array_equal(value, getattr(other, name))


@pytest.mark.parametrize(
    ("change", "code", "shown"),
    [
        (
            {"observation": RobotObservation({}, OBSERVATION.state, "x")},
            "camera_image_missing",
            ["'observation.images.b'"],
        ),
        ({"observation": replace(OBSERVATION, state=np.zeros(3, np.float32))}, "dimensions_mismatch", [(3,), 2]),
        ({"observation": replace(OBSERVATION, task="x" * 900)}, "example_too_long", [1000]),
        (
            {"observation": replace(OBSERVATION, task="take <im_patch>")},
            "image_token_in_text",
            ["take <im_patch>", "episode 3, frame 5"],
        ),
        ({"actions": DONE[:3]}, "chunk_shape_mismatch", [(3, 3), (4, 3)]),
        ({"actions": np.where(DONE == 1, np.nan, DONE)}, "action_not_finite", ["'b'", "step 0"]),
        ({"actions": DONE * 2}, "gripper_out_of_range", ["'gripper'", -2, "step 0"]),
        ({"padding": [True]}, "chunk_shape_mismatch", [(1,), (4,)]),
    ],
    ids=["camera", "state", "length", "image token", "chunk", "nan", "gripper", "padding"],
)
def test_rejects_invalid_frames(change: dict[str, Any], code: str, shown: list[Any], fast: ActionTokens) -> None:
    arguments: dict[str, Any] = {"observation": OBSERVATION, "actions": DONE} | change
    with refused(code, *shown, "episode 3, frame 5"):
        build(policy(semantics="seed"), fast).encode(**arguments, where="episode 3, frame 5")


@pytest.mark.parametrize(
    "bad",
    [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((0, 4, 3))],
    ids=["floats", "alpha", "gray", "empty"],
)
def test_rejects_arrays_that_are_not_rgb_uint8(bad: np.ndarray, fast: ActionTokens) -> None:
    with refused("invalid_image_array", bad.dtype, bad.shape, "frame 5", CAMERAS[1]):
        seen = replace(OBSERVATION, images={**OBSERVATION.images, CAMERAS[1]: bad})
        build(policy(), fast).encode(seen, where="frame 5")


def without(word: str) -> tuple[str, ...]:
    """Return the special tokens with `word` renamed."""
    return tuple("<unused>" if each == word else each for each in WORDS + EXTRAS)


@pytest.mark.parametrize(
    ("code", "shown", "changes"),
    [
        ("action_tokenizer_missing", ["'both'"], {"fast": None}),
        ("model_too_small", [4, 3], {"horizon": 3}),
        ("model_too_small", [3, 2], {"config": config(max_action_dim=2)}),
        ("model_too_small", ["action tokens", 9], {"config": config(num_action_tokens=9)}),
        ("special_token_mismatch", ["<im_patch>", 3], {"config": config(image_patch_id=3)}),
        ("special_token_mismatch", ["<state_15>"], {"tokenizer": tokenizer(without("<state_15>"))}),
        ("special_token_mismatch", ["<im_col>"], {"tokenizer": tokenizer(without("<im_col>"))}),
        ("special_token_missing", ["pad_token"], {"tokenizer": tokenizer(pad=None)}),
    ],
    ids=["action tokenizer", "horizon", "dimensions", "action tokens", "token id", "state token", "image token", "pad"],
)
def test_rejects_parts_that_do_not_fit(
    code: str, shown: list[object], changes: dict[str, Any], fast: ActionTokens
) -> None:
    with refused(code, *shown):
        build(policy(), **({"fast": fast} | changes))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Pick up the black bowl.", "pick up the black bowl"),
        ("  Pick\tup \n the bowl  ", "pick up the bowl"),
        ("Task: Pick up the bowl!", "pick up the bowl"),
        ("instruction - open the drawer", "open the drawer"),
        ("language_instruction: open it", "open it"),
        ("The task is to open the drawer.", "open the drawer"),
        ('"Your task is to open the drawer."', "open the drawer"),
        ("\u201copen the drawer\u2026\u201d", "open the drawer"),
        ("[goal: (open the drawer).]", "open the drawer"),
        ("Task: the task is to open it", "open it"),
        ("Open it. Then close it!", "open it; then close it"),
        ("Open it... Close it?", "open it; close it"),
        ("v1.5 of it", "v1; 5 of it"),
        ("tasks are many", "tasks are many"),
        ("", ""),
        (" .!? ", ""),
    ],
)
def test_task_text_is_normalized(text: str, wanted: str) -> None:
    assert normalize_language(text) == wanted
    assert normalize_language(wanted) == wanted or "; " in wanted


def test_setup_and_control_are_wrapped_once() -> None:
    assert wrap("one arm", "setup", True) == "<setup_start>one arm<setup_end>"
    assert wrap("<setup_start>one arm<setup_end>", "setup", True) == "<setup_start>one arm<setup_end>"
    assert wrap("joints", "control", False) == "joints"
    assert wrap("", "control", True) == ""


def test_only_several_images_have_labels() -> None:
    assert [image_labels(count) for count in range(3)] == [(), ("",), ("Image 1", "Image 2")]


def test_state_is_binned_to_the_nearest_even_bin() -> None:
    state = np.array([-1, 1, 0, np.nan, np.inf, -np.inf, 7, -7, -0.5, 0.25], np.float32)
    assert state_bins(state, 256).tolist() == [0, 255, 128, 128, 255, 0, 255, 0, 64, 159]
    assert state_bins(np.array([0.0], np.float32), 2).tolist() == [0]


@pytest.mark.parametrize(
    ("parts", "tokens"),
    [
        ((2, 8, 7, 10, True), 640),
        ((2, 8, 7, 10, False), 576),
        ((2, 8, 7, 30, True), 768),
        ((3, 14, 14, 30, True), 1216),
    ],
)
def test_sequence_budget_equals_the_published_one(parts: tuple[int, int, int, int, bool], tokens: int) -> None:
    assert sequence_budget(*parts) == tokens
