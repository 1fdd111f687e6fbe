"""Experts are read and written as (expert, in, out), whatever their widths; routers are frozen."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from armature.components.models.load import load_model, load_processor, save_checkpoint
from armature.components.training.ranks import Ranks
from armature.components.vlm.publish import Publisher
from tests.vlm.conftest import model_settings


@pytest.mark.parametrize("width", [96, 64, 32], ids=["unequal", "down is square", "gate and up are square"])
def test_experts_are_transposed_in_files_whatever_their_widths(width, checkpoint, tmp_path):
    source, settings = checkpoint("qwen3-vl-moe"), model_settings()
    config, processor = AutoConfig.from_pretrained(source), load_processor(source, settings)
    config.text_config.moe_intermediate_size = width
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save_checkpoint(model, processor, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved", settings)
    publisher = Publisher(loaded, processor, tmp_path / "processor")
    publisher.publish(loaded, tmp_path / "published", Ranks())
    publisher.publish_delta(loaded, tmp_path / "series/000001", Ranks())
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("saved", "published", "series/000001")]
    state = model.state_dict()
    for written in (*files, publisher.tensors(loaded)):
        assert written.keys() == state.keys()
        for name, tensor in state.items():
            by_hand = tensor.mT if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else tensor
            assert torch.equal(written[name], by_hand), name
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_router_is_frozen_and_experts_are_trained(checkpoint):
    model = load_model(checkpoint("qwen3-vl-moe"), model_settings())
    frozen = {name.partition("layers.")[2] for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {"0.mlp.gate.weight", "1.mlp.gate.weight"}
