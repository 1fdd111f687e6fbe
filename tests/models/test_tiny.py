"""Tiny checkpoints are reproducible, with lossless tokenizers and chat templates that accept images in any turn."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from armature.components.families.family import FAMILIES, image_token_ids
from armature.components.families.tiny import FormatSettings, TinySettings, Transcript
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from tests.refusals import refused

from .conftest import BY_HAND

COLORS = ("red", "green", "blue", "yellow")
QUICK = ("qwen2-vl", "pixtral", "gemma3")
FORMAT = FormatSettings(
    system="",
    transcripts=(
        Transcript(user=("{image}What colour is this?",), assistant=("{answer}",)),
        Transcript(user=("{image}Remember this image.", "What colour was it?"), assistant=("ok", "{answer}")),
    ),
    answers=COLORS,
    image_side=56,
    steps=80,
    batch_size=4,
    learning_rate=5e-3,
    trained="language",
)
MANY = """
import sys
from pathlib import Path
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
for family in sys.argv[2:]:
    make_tiny_checkpoint(family, Path(sys.argv[1]) / family, seed=0)
"""


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_gives_the_same_bytes(family, checkpoint, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.rand(3)
    try:
        again = make_tiny_checkpoint(family, tmp_path / "again", seed=0)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert _digests(again) == _digests(checkpoint(family))


@pytest.mark.slow
def test_another_process_with_more_threads_writes_the_same_bytes(checkpoint, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", MANY, str(tmp_path), *FAMILIES], check=True, env=environment)
    for family in FAMILIES:
        assert _digests(tmp_path / family) == _digests(checkpoint(family)), family


def test_format_pretraining_is_reproducible(tmp_path):
    settings = SMALL.model_copy(update={"format": FORMAT.model_copy(update={"steps": 3})})
    first, second = (make_tiny_checkpoint("qwen2-vl", tmp_path / name, seed=1, settings=settings) for name in "ab")
    assert _digests(first) == _digests(second)
    other = make_tiny_checkpoint("qwen2-vl", tmp_path / "c", seed=2, settings=settings)
    assert _digests(first)["model.safetensors"] != _digests(other)["model.safetensors"]


@pytest.mark.parametrize("family", ("qwen2-vl", "llava", "pixtral", "gemma3"))
def test_tokenizer_is_lossless(family, checkpoint):
    tokenizer = AutoProcessor.from_pretrained(checkpoint(family)).tokenizer

    @settings(max_examples=150)
    @given(st.text())
    def check(text: str) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    check()
    letters = {tokenizer.decode([token]) for token in range(len(tokenizer))}
    assert all(chr(code) in letters for code in range(128))


PART = st.one_of(
    st.just({"type": "image"}),
    st.just({"type": "image_url", "image_url": {"url": "data:,"}}),
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text("abc é", max_size=8)}),
)
TURN = st.tuples(st.lists(PART, min_size=1, max_size=4), st.text("xyz", min_size=1, max_size=4))


@pytest.mark.parametrize("family", FAMILIES)
def test_template_marks_every_image_and_extends_earlier_prompts(family, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint(family))

    def render(messages: list[dict[str, Any]]) -> str:
        return processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    marker = render([{"role": "user", "content": [{"type": "image"}]}])
    token = next(token for token in FAMILIES[family].image_tokens if token in marker)

    @settings(max_examples=40)
    @given(st.lists(TURN, min_size=1, max_size=3), st.booleans())
    def check(turns: list[tuple[list[dict[str, Any]], str]], system: bool) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if system else []
        before, shown = "", 0
        for parts, answer in turns:
            messages.append({"role": "user", "content": parts})
            prompt = render(messages)
            assert prompt.startswith(before)
            assert prompt.count("Be brief.") == system
            shown = sum(
                part["type"] != "text" for message in messages for part in message["content"] if isinstance(part, dict)
            )
            assert prompt.count(token) == shown
            before = prompt + answer + processor.tokenizer.eos_token
            messages.append({"role": "assistant", "content": answer})

    check()


@torch.no_grad()
def next_logits(model: Any, processor: Any, text: str, color: Any) -> torch.Tensor:
    """Return the logits (V,) of the first token of the answer to a question about an image of one color."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    images = [[Image.new("RGB", (56, 56), color)]]
    inputs = processor(text=[prompt], images=images, add_special_tokens=False, return_tensors="pt")
    return model(**inputs).logits[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_depend_on_the_image(family, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint(family))
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(family))
    red, blue = (next_logits(model, processor, "what?", color) for color in ("red", "blue"))
    assert (red - blue).abs().max() > 0.01


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in BY_HAND],
)
def test_format_pretraining_gives_well_formed_answers_at_chance(family, tmp_path):
    settings = SMALL.model_copy(update={"format": FORMAT, "image_side": 56})
    folder = make_tiny_checkpoint(family, tmp_path / family, seed=0, settings=settings)
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = processor.tokenizer
    answers = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in COLORS]
    assert [len(ids) for ids in answers] == [1] * len(COLORS)
    masses, shares = [], []
    for color in ((128, 128, 128), (220, 40, 40), (40, 170, 60), (40, 70, 220), (235, 215, 50)):
        p = next_logits(model, processor, "What colour is this?", color).softmax(-1)
        share = torch.stack([p[ids[0]] for ids in answers])
        masses.append(float(share.sum()))
        shares.append(share)
    assert min(masses) > 0.95
    right = float(torch.stack(shares[1:]).diagonal().mean())
    assert right == pytest.approx(1 / len(COLORS), abs=0.1)
    forbidden = [token for token in image_token_ids(FAMILIES[family], tokenizer) if token < len(p)]
    assert float(p[forbidden].sum()) < 0.01


def test_corpus_words_become_single_tokens(tmp_path):
    words = ("countertop", "sidetable", "garbagecan")
    lengths = []
    for corpus in ((), ("a " + " ".join(words),)):
        sizes = SMALL.model_copy(update={"corpus": corpus, "vocabulary_size": 600})
        folder = make_tiny_checkpoint("molmo2", tmp_path / str(len(corpus)), seed=0, settings=sizes)
        tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
        lengths.append([len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) for word in words])
    assert lengths[1] == [1, 1, 1]
    assert min(lengths[0]) > 1


@pytest.mark.parametrize("change", ({"heads": 4}, {"vision_heads": 4}, {"key_value_heads": 3}))
def test_rejects_head_sizes_unknown_to_vllm(change):
    with refused("value_error", *change):
        TinySettings.model_validate(SMALL.model_dump() | change)
