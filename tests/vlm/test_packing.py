"""Packed rows: their layout, and log-probs, gradients and steps compared with separate rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armature.components.artifacts.images import encode_png
from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.images import EncodedImage, ImageRef
from armature.components.families.family import FAMILIES
from armature.components.models.adapters import model_inputs
from armature.components.models.packed import complete_packing
from armature.components.models.settings import LoraSettings
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import FeatureCache
from armature.components.vlm.logprobs import Policy, predicting
from armature.components.vlm.packing import micro_batches, packed_batch, packed_micro_batches, packing_of
from armature.components.vlm.sft.demonstrate import PromptWriter
from tests.family_table import ALL, record
from tests.images import noise
from tests.models.clips import asks, clip

from .conftest import LORA, Tiny, assert_same_step, learner_of, step, stepped, trainer_settings

IMAGE_TOKENS = (1, 2, 3)
"""Numbers of tokens that the images in generated rows have."""
IMAGE, START = 9, 8
"""The id of image tokens, and the id of the token before an image. A cut must not separate the two."""


@dataclass(frozen=True)
class Row:
    """A row of generated texts and images, in order."""

    parts: tuple[tuple[int, ...] | int, ...]

    @property
    def images(self) -> list[int]:
        return [part for part in self.parts if isinstance(part, int)]

    @property
    def ids(self) -> np.ndarray[Any, Any]:
        parts = ((START, *[IMAGE] * IMAGE_TOKENS[p]) if isinstance(p, int) else p for p in self.parts)
        return np.array([token for part in parts for token in part])

    @property
    def content(self) -> np.ndarray[Any, Any]:
        ids = self.ids.copy()
        ids[ids == IMAGE] = np.repeat([-1 - image for image in self.images], [IMAGE_TOKENS[i] for i in self.images])
        return ids


TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
ROW = st.builds(
    lambda first, more: Row((first, *more)), TEXT, st.lists(TEXT | st.integers(0, 2), max_size=4).map(tuple)
)
ROWS = st.lists(ROW, min_size=1, max_size=8)


def packed(rows: Sequence[Row]) -> Any:
    return packing_of(
        [row.content for row in rows],
        [row.ids >= START for row in rows],
        [row.images for row in rows],
        [np.flatnonzero(row.ids == IMAGE) for row in rows],
        IMAGE_TOKENS,
    )


@given(ROWS)
def test_packed_tokens_attend_to_their_row_only(rows):
    packing = packed(rows)
    ends = np.cumsum(packing.key_lengths)
    keys = [packing.keys[end - size : end].tolist() for end, size in zip(ends, packing.key_lengths, strict=True)]
    numbers = np.repeat(np.arange(len(packing.lengths)), packing.lengths)
    firsts = np.cumsum([0, *packing.lengths])
    contents = [rows[row].content[column] for row, column in zip(packing.rows, packing.columns, strict=True)]
    for row, places in zip(rows, packing.places.tolist(), strict=True):
        places = places[: len(row.ids)]
        assert [contents[place] for place in places] == row.content.tolist()
        assert packing.columns[places].tolist() == list(range(len(places)))
        for column, place in enumerate(places):
            segment = numbers[place]
            seen = len(keys[segment]) - packing.lengths[segment] + place - firsts[segment] + 1
            assert keys[segment][:seen] == places[: column + 1]
        run = row.ids >= START
        for before, after in pairwise(range(len(places))):
            assert not (run[before] and run[after]) or numbers[places[before]] == numbers[places[after]]
    shown = [-1 - image for image in packing.images for _ in range(IMAGE_TOKENS[image])]
    assert [value for value in contents if value < 0] == shown


@given(st.lists(TEXT, min_size=1, max_size=8))
def test_shared_prefixes_are_stored_once(rows):
    beginnings = {row[: end + 1] for row in rows for end in range(len(row))}
    assert len(packed([Row((row,)) for row in rows]).rows) == len(beginnings)


@given(st.lists(TEXT, min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_packed_plan_contains_each_row_once_within_limits(texts, max_tokens, max_rows, ranks):
    samples = [_sample(np.array(text), (), f"{row}") for row, text in enumerate(texts)]
    rows = range(len(samples))
    plan = packed_micro_batches(samples, rows, max_tokens, max_rows, IMAGE, ranks)
    assert sorted(row for micro in plan for row in micro.rows) == list(rows)
    assert all(micro.samples == tuple(samples[row] for row in micro.rows) and micro.packed for micro in plan)
    for micro in plan:
        assert len(micro.rows) <= max_rows
        tokens = len({texts[row][: end + 1] for row in micro.rows for end in range(len(texts[row]))})
        assert tokens <= max_tokens or len(micro.rows) == 1
    assert plan == packed_micro_batches(samples, rows, max_tokens, max_rows, IMAGE, ranks)


@given(st.lists(TEXT, min_size=1, max_size=6), st.integers(1, 30), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_pairs_are_neighbors_in_one_micro_batch(texts, max_tokens, max_rows, ranks, packing):
    samples = [_sample(np.array(text + end), (), "") for text in texts for end in ((1,), (2, 3))]
    if packing:
        plan = packed_micro_batches(samples, range(len(samples)), max_tokens, max_rows, IMAGE, ranks, together=2)
    else:
        plan = micro_batches(samples, range(len(samples)), max_tokens, max_rows, ranks, together=2)
    pairs = [(micro.rows[at], micro.rows[at + 1]) for micro in plan for at in range(0, len(micro.rows), 2)]
    assert sorted(pairs) == [(row, row + 1) for row in range(0, len(samples), 2)]
    for micro in plan:
        assert micro.samples == tuple(samples[row] for row in micro.rows)
        assert len(micro.rows) <= max(max_rows, 2)
        longest = max(len(each.input_ids) for each in micro.samples)
        assert packing or len(micro.rows) == 2 or longest * len(micro.rows) <= max_tokens


def test_packed_groups_stay_together_if_they_fit():
    group = [[k, k, k, k, *end] for k in (1, 2, 3) for end in ((5,), (6,), (7,))]
    samples = [_sample(np.array(ids), (), f"{row}") for row, ids in enumerate(group)]
    plan = packed_micro_batches(samples, range(9), 20, 64, IMAGE)
    assert [micro.rows for micro in plan] == [(0, 1, 2, 3, 4, 5), (6, 7, 8)]


def test_packed_rows_are_divided_evenly_among_ranks():
    """Groups stay whole if that is equally even; otherwise one is cut."""
    group = [[k] * 6 + [10 + 10 * k + row] * 4 for k in range(4) for row in range(3)]  # 18 tokens each when packed
    samples = [_sample(np.array(ids), (), f"{row}") for row, ids in enumerate(group)]
    plan = packed_micro_batches(samples, range(12), 1000, 64, IMAGE, 2)
    assert [micro.rows for micro in plan] == [tuple(range(6)), tuple(range(6, 12))]
    plan = packed_micro_batches(samples, range(9), 1000, 64, IMAGE, 2)
    assert [micro.rows for micro in plan] == [(0, 1, 2, 3, 4), (5, 6, 7, 8)]
    plan = packed_micro_batches(samples, range(9), 20, 64, IMAGE, 2)
    assert [len(micro.rows) for micro in plan] == [3, 3, 3]
    assert len(packed_micro_batches(samples, range(1), 1000, 64, IMAGE, 2)) == 1


def test_padded_rows_are_divided_evenly_among_ranks():
    samples = [_sample(np.arange(length), (), f"{length}") for length in (8, 8, 6, 6, 4, 4, 2, 2)]
    plan = micro_batches(samples, range(8), 1000, 64, 2)
    assert [micro.rows for micro in plan] == [(0, 1, 2), (3, 4, 5, 6, 7)]
    assert len(micro_batches(samples, range(8), 1000, 64)) == 1


def _sample(ids: Any, images: tuple[ImageRef, ...], name: str, mask: Any = None, seed: int = 0) -> Sample:
    rng = np.random.default_rng([seed, len(ids)])
    mask = np.zeros(len(ids), dtype=bool) if mask is None else mask
    values = [np.where(mask, rng.normal(mean, 0.3, len(ids)), 0).astype(np.float32) for mean in (-6.0, 0.0)]
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(name, "g", name, ids.astype(np.int32), mask, values[0], versions, values[1], 0.0, images)


def _image(tiny: Tiny, seed: int, size: tuple[int, int]) -> ImageRef:
    return tiny.images.put(encode_png(noise(seed, width=size[1], height=size[0])))


def conversations(tiny: Tiny) -> list[Sample]:
    """Return samples of conversations, which have shared prefixes of different lengths, and two, one or no images."""
    sizes = [(84, 56), (56, 112), (56, 112), (112, 56)]
    a, b, c, upright = (_image(tiny, seed, size) for seed, size in enumerate(sizes))
    question = {"type": "text", "text": "What colour?"}

    def sample(name: str, turns: Sequence[tuple[tuple[ImageRef, ...], str]], last: str) -> Sample:
        chat = []
        for shown, answer in turns:
            chat.append({"role": "user", "content": [*({"type": "image"} for _ in shown), question]})
            chat.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        text = tiny.processor.apply_chat_template(chat[:-1], add_generation_prompt=True, tokenize=False)
        refs = tuple(ref for shown, _ in turns for ref in shown)
        images = [tiny.images.open(ref) for ref in refs] or None
        prompt = np.asarray(list(tiny.processor(text=[text], images=images)["input_ids"][0]))
        ids = np.concatenate([prompt, tiny.adapter.tokenizer(last, add_special_tokens=False)["input_ids"]])
        mask = ~np.isin(ids, sorted(tiny.collator.forbidden_token_ids)) & (np.arange(len(ids)) % 5 != 0)
        return _sample(ids, refs, name, mask, seed=len(name))

    return [
        sample("two turns", [((a,), "red"), ((b,), "")], "it is blue"),
        sample("another answer", [((a,), "red"), ((b,), "")], "it may be green"),
        sample("another image", [((a,), "red"), ((c,), "")], "it is blue"),
        sample("the same", [((a,), "red"), ((b,), "")], "it is blue"),
        sample("one turn", [((a,), "")], "red"),
        sample("both images", [((b, a), "")], "red and blue"),
        sample("as many tokens, of other shape", [((upright, a), "")], "red and blue"),
        sample("text", [((), "")], "nothing"),
    ]


def results(policy: Policy, batches: Sequence[tuple[Any, Any]]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return log-probs and entropies of all rows, and the gradients of their weighted sum by parameter name."""
    policy.zero_grad()
    outputs = []
    for batch, packing in batches:
        logprobs, entropy = policy(model_inputs(batch), predicting(batch.loss_mask), packing, batch.experts)
        weight = batch.advantages[:, 1:][batch.loss_mask[:, 1:]]
        (weight * logprobs + 0.1 * entropy).sum().backward()
        outputs += [logprobs.detach(), entropy.detach()]
    return outputs, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def apart(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with different first tokens, so that they share nothing."""
    return [
        replace(one, input_ids=np.array([60 + number, *one.input_ids[1:]], np.int32))
        for number, one in enumerate(samples)
    ]


def assert_rows_are_separate(
    tiny: Tiny, model: Any, samples: list[Sample], tmp_path: Any, shared: bool = True
) -> float:
    """Check that packing all rows together gives the same results as each row alone, in fp32 within a relative 1e-6.

    Returns the largest difference of a log-prob, in nats. Rows that are not `shared` must not begin alike.
    """
    forbidden = sorted(tiny.collator.forbidden_token_ids)
    policy = Policy(model, logprobs="torch", temperature=1.0, forbidden_token_ids=forbidden, packing=True)
    features = FeatureCache(tiny.collator, tiny.images, tmp_path)
    batch = packed_batch(tiny.collator, samples, features)
    tokens = sum(len(sample.input_ids) for sample in samples)
    assert len(batch.packing.rows) < 0.7 * tokens if shared else len(batch.packing.rows) == tokens
    packing = complete_packing(policy.model, model_inputs(batch), batch.grids, batch.packing)
    ours, our_gradient = results(policy, [(batch, packing)])
    rows = [(tiny.collator.collate_features([sample], features), None) for sample in samples]
    alone, gradient = results(policy, rows)
    for one, other in ((ours[0], torch.cat(alone[::2])), (ours[1], torch.cat(alone[1::2]))):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert our_gradient.keys() == gradient.keys()
    norm = torch.stack([value.norm() for value in gradient.values()]).norm()
    gaps = {name: (our_gradient[name] - value).norm() for name, value in gradient.items()}
    assert torch.stack([*gaps.values()]).norm() < 1e-6 * norm
    for name, value in gradient.items():
        assert gaps[name] < 5e-6 * value.norm() + 1e-8 * norm, name
    return float((ours[0] - torch.cat(alone[::2])).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cell", ["shared", "packed"] if ALL else ["shared"])
def test_packed_rows_equal_separate_rows(family, cell, make_tiny, tmp_path):
    tiny, shared = make_tiny(family), cell == "shared"
    samples = conversations(tiny) if shared else apart(conversations(tiny))
    record(family, cell, assert_rows_are_separate(tiny, tiny.model(), samples, tmp_path, shared))


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen3.5"])
def test_packed_videos_equal_separate_rows(family, make_tiny, tmp_path):
    """Rows share a video, an image, both or the first turn; videos with equal tokens differ in frames."""
    tiny = make_tiny(family)
    writer, one, other, image = PromptWriter(tiny.processor), clip(6, 1.0), clip(6, 1.0, seed=1), noise(2, 84, 56)
    chats = [
        ([one, "What moves?"], "red"),
        ([one, "What moves?"], "green and blue"),
        ([other, "What moves?"], "red"),
        ([one, image, "and", other, "What moves?"], "blue"),
        ([one, image, "and", other, "What moves?"], "a dog"),
        ([image, "What is it?"], "blue"),
    ]
    samples = []
    for number, (parts, answer) in enumerate(chats):
        prompt = tiny.collator.as_image_tokens(writer.prompt([asks(*parts)]))
        shown = [
            part if isinstance(part, EncodedImage) else encode_png(part) for part in parts if not isinstance(part, str)
        ]
        ids = np.concatenate([prompt, writer.answer(answer)])
        mask = np.arange(len(ids)) >= len(prompt)
        samples.append(_sample(ids, tuple(map(tiny.images.put, shown)), str(number), mask, seed=number))
    assert_rows_are_separate(tiny, tiny.model(), samples, tmp_path)


@pytest.mark.parametrize("family", ["pixtral", "gemma3"])
def test_sliding_windows_work_across_shared_prefixes(family, make_tiny, tmp_path):
    """pixtral has windows in all layers; gemma3 in some, and its image tokens attend in both directions."""
    tiny = make_tiny(family)
    model = tiny.model()
    model.config.text_config.sliding_window = 12
    for module in model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = 12
    assert_rows_are_separate(tiny, model, conversations(tiny), tmp_path)


EVERYWHERE = LoraSettings(rank=4, alpha=8, targets=("q_proj", "v_proj", "qkv"), scope="all")


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({}, {"max_tokens_per_micro_batch": 4096, "max_rows_per_micro_batch": 64}),
        ({"gradient_checkpointing": True}, {"correction": {"mode": "truncate"}, "samples_per_update": 4}),
        ({"freeze": ("vision", "projector")}, {"kl_coefficient": 0.1}),
        ({"lora": LORA}, {"kl_coefficient": 0.1}),
        ({"lora": EVERYWHERE}, {"entropy_coefficient": 0.01}),
    ],
    ids=["one micro-batch", "several updates", "frozen tower", "adapters", "adapters in the tower"],
)
def test_packed_step_equals_padded_step(tiny, model, changes):
    samples, done = [*tiny.samples(6, seed=1), *conversations(tiny)], []
    for packing in (False, True):
        torch.manual_seed(0)  # adapters are initialized randomly
        learner = learner_of(tiny, tiny.model(**model), packing=packing, adam_epsilon=1e-3, **changes)
        done.append(stepped(learner, tiny, samples))
    plain, packed = done
    assert_same_step(packed, plain)
    assert packed.metrics.keys() ^ plain.metrics.keys() == {"tokens/computed"}
    assert packed.metrics["tokens/computed"] < 0.8 * packed.metrics["tokens/total"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("autocast", "tolerance"), [("none", 1e-4), ("bf16", 3e-2)])
def test_gpu_packed_step_is_close_to_padded_step(family, autocast, tolerance, make_tiny):
    tiny, norms = make_tiny(family), []
    for packing in (False, True):
        settings = trainer_settings(packing=packing, autocast=autocast)
        learner = Learner(tiny.model(), settings, temperature=1.0, ranks=Ranks(device=torch.device("cuda")))
        norms.append(step(learner, tiny, conversations(tiny))["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=tolerance)


def test_vision_tower_gets_each_distinct_image_once(tiny, tmp_path):
    samples = conversations(tiny)
    learner = learner_of(tiny, tiny.model(), packing=True, max_tokens_per_micro_batch=4096, max_rows_per_micro_batch=64)
    seen: list[int] = []
    learner.model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0])), with_kwargs=True
    )
    step(learner, tiny, samples)
    features = FeatureCache(tiny.collator, tiny.images, tmp_path)
    images = {ref for sample in samples for ref in sample.images}
    assert len(images) == 4
    assert seen == [sum(len(features(ref)["pixel_values"]) for ref in images)]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda model: setattr(model.config.text_config, "_attn_implementation", "eager"), "model.attn_implementation"),
        (lambda model: model.config.text_config.layer_types.append("linear_attention"), "Qwen2VL"),
        (lambda model: setattr(model.config.text_config, "use_bidirectional_attention", "vision"), "Qwen2VL"),
        (lambda model: setattr(model.model, "forward", lambda input_ids: None), "Qwen2VL"),
    ],
)
def test_rejects_packing_of_unsupported_models(tiny, change, place):
    model = tiny.model()
    change(model)
    with pytest.raises(ConfigurationError) as caught:
        learner_of(tiny, model, packing=True)
    assert caught.value.where.startswith(f"trainer.packing, {place}")


def test_rejects_packing_if_layer_skips_attention(tiny):
    model = tiny.model()
    model.model.language_model.layers[1].self_attn.forward = lambda hidden_states, **more: (hidden_states, None)
    with pytest.raises(ConfigurationError) as caught:
        step(learner_of(tiny, model, packing=True), tiny, tiny.samples(2, seed=0))
    assert caught.value.where.startswith("trainer.packing, Qwen2VL")
