"""The described families, compared with the models themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from armature.components.families.family import COMPONENTS, FAMILIES, family_of, image_token_ids
from armature.components.training.sharding import layers
from tests.refusals import refused


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_a_component_and_every_block_is_wrapped(name, checkpoint):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(name))
    family = family_of(model.config)
    assert family.name == name
    assert {family.component_of(key) for key, _ in model.named_parameters()} == set(COMPONENTS)
    assert {type(module).__name__ for module in layers(model, family)} == set(family.wrap_classes)


@pytest.mark.parametrize(
    ("name", "text_model", "layer"), [("llava", "mistral", "Mistral"), ("internvl", "qwen3_moe", "Qwen3Moe")]
)
def test_layers_of_another_language_model_are_wrapped(name, text_model, layer, checkpoint):
    config = AutoConfig.from_pretrained(checkpoint(name))
    sizes = {key: getattr(config.text_config, key) for key in ("vocab_size", "hidden_size", "num_attention_heads")}
    config.text_config = AutoConfig.for_model(text_model, **sizes, num_hidden_layers=3)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    family = family_of(config)
    wrapped = [type(module).__name__ for module in layers(model, family)]
    assert family.name == name and wrapped.count(f"{layer}DecoderLayer") == 3
    assert set(wrapped) == {f"{layer}DecoderLayer", family.wrap_classes[1]}


@pytest.mark.parametrize("name", FAMILIES)
def test_placeholder_is_a_forbidden_token(name, checkpoint):
    folder, family = checkpoint(name), FAMILIES[name]
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    forbidden = image_token_ids(family, tokenizer)
    assert getattr(config, family.placeholder) in forbidden
    assert len(forbidden) == len(family.image_tokens)
    assert tokenizer.eos_token_id not in forbidden


def test_unknown_model_type_lists_the_families():
    with refused("unknown_model_type", "'bert'", *FAMILIES):
        family_of("bert")


def test_rejects_parameter_without_component():
    with refused("parameter_without_component", "model.audio_tower"):
        FAMILIES["llava"].component_of("model.audio_tower.weight")
