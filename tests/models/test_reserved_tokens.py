"""Special tokens read from the files of every family's tokenizer equal the ones that transformers loads."""

from __future__ import annotations

import json

import pytest
from transformers import AutoProcessor

from armature.components.contracts.errors import DataError
from armature.components.families.tiny import TinySettings
from armature.components.models.adapters import get_collator
from armature.components.models.reserved_tokens import reserved_tokens
from armature.components.models.settings import ModelSettings

from .conftest import EVERY_FAMILY


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_reserved_tokens_equal_the_loaded_tokenizer_s(family, checkpoint):
    folder = checkpoint(family)
    processor = AutoProcessor.from_pretrained(folder)
    special = set(processor.tokenizer.all_special_tokens)
    collator = get_collator(folder, processor)
    images = set(processor.tokenizer.convert_ids_to_tokens(collator.forbidden_token_ids))
    added = {token.content for token in processor.tokenizer.added_tokens_decoder.values() if token.special}
    tiny = ModelSettings(source=f"tiny/{family}", tiny=TinySettings())
    for settings in (ModelSettings(source=str(folder)), tiny):
        assert set(reserved_tokens(settings, images_only=False)) == special | images | added
        of_images = set(reserved_tokens(settings, images_only=True))
        assert images <= of_images and processor.image_token in of_images
        assert not of_images & {
            processor.tokenizer.eos_token,
            processor.tokenizer.bos_token,
            processor.tokenizer.pad_token,
        }


@pytest.mark.parametrize("left_out", ["tokenizer.json", "tokenizer_config.json"])
def test_reserved_tokens_need_only_one_tokenizer_file(left_out, checkpoint, tmp_path):
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    for name in names:
        if name != left_out:
            (tmp_path / name).write_bytes((checkpoint("qwen2-vl") / name).read_bytes())
    if left_out == "tokenizer.json":  # slow tokenizers and older versions save only this file
        whole = json.loads((checkpoint("qwen2-vl") / "tokenizer.json").read_bytes())
        listed = {str(each["id"]): {"content": each["content"], "special": True} for each in whole["added_tokens"]}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    assert {"<|image_pad|>", "<|im_end|>"} <= set(
        reserved_tokens(ModelSettings(source=str(tmp_path)), images_only=False)
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"[1]") for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json")),
        *((name, b"") for name in ("config.json", "tokenizer.json", "special_tokens_map.json")),
        ("tokenizer.json", b'{"added_tokens": [1]}'),
        ("tokenizer.json", b'{"added_tokens": [{"content": "x"}]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}'),
        ("added_tokens.json", b'{"x": null}'),
        ("tokenizer.json", b"[" * 100_000),
    ],
)
def test_rejects_damaged_tokenizer_file_by_name(name, content, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        reserved_tokens(ModelSettings(source=str(tmp_path)), images_only=False)
    assert str(tmp_path) in str(refused.value.where)


def test_reserved_tokens_of_a_hub_model_fetch_no_weights(hub, checkpoint):
    files = {path.name: path.read_bytes() for path in checkpoint("llava").iterdir() if path.is_file()}
    hub.add("model", "someone/small", files)
    settings = ModelSettings(source="someone/small", revision="main")
    assert reserved_tokens(settings, images_only=True) == ("<image>",)
    assert not any("safetensors" in request for request in hub.asked if request.startswith("GET"))
    assert any("tokenizer.json" in request for request in hub.asked)
