"""The bytes of a rank against FSDP2 itself, split over 1,024 ranks of which one is there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from armature.components.models.families import family_of
from armature.components.models.load import load_model
from armature.components.models.settings import ModelSettings, TinySettings
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.planning.geometry import ModelGeometry, geometry, read_config, trainer_bytes
from armature.components.training.ranks import Ranks
from armature.components.training.sharding import blocks, sharder
from armature.components.vlm.settings import TrainerSettings

TINY = TinySettings(layers=3)
MODEL = ModelSettings(source="tiny/qwen2-vl", tiny=TINY, dtype="float32")
TRAINER = TrainerSettings(learning_rate=1e-3, max_steps=1, max_tokens_per_micro_batch=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("qwen2-vl", tmp_path_factory.mktemp("model") / "qwen2-vl", 0, TINY)


@pytest.fixture(params=[2, 48, 1024])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield Ranks(0, request.param)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sizes(folder: Path) -> ModelGeometry:
    return geometry(read_config(MODEL), MODEL, TRAINER, "float32")


def sharded(folder: Path, ranks: Ranks) -> nn.Module:
    """The policy of a trainer's first rank, by the code that trains."""
    loaded = load_model(folder, MODEL)
    model = load_model(folder, MODEL, empty=True)
    units = partial(blocks, family=family_of(model.config), dtype=None)
    sharder(ranks, 1, units, dict(loaded.state_dict()), cast_inputs=True)(model)
    return model


def test_a_tiny_model_is_counted_without_being_made(folder: Path, sizes: ModelGeometry) -> None:
    assert sizes.parameters == sum(parameter.numel() for parameter in load_model(folder, MODEL).parameters())


def test_a_rank_holds_what_the_formula_says(folder: Path, ranks: Ranks, sizes: ModelGeometry) -> None:
    parameters = list(sharded(folder, ranks).parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    assert sum(parameter.to_local().numel() for parameter in parameters) == sizes.shard(ranks.size)


def test_with_its_optimizer_a_rank_has_sixteen_bytes_for_each_of_its_weights(
    folder: Path, ranks: Ranks, sizes: ModelGeometry
) -> None:
    parameters = list(sharded(folder, ranks).parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    optimizer.step()
    held = [value for p in parameters for value in (p, p.grad, *optimizer.state[p].values())]
    bytes_ = sum(value.to_local().nbytes for value in held if isinstance(value, DTensor))
    estimate = sizes.estimate
    whole = (sizes.root + 2 * sizes.largest) * 4 + max(sizes.root, sizes.largest) * 8
    assert bytes_ == trainer_bytes(sizes, TRAINER, ranks.size) - whole - estimate.activations - estimate.logits
    shared = trainer_bytes(sizes, TRAINER, ranks.size, sharing=2)
    assert bytes_ == shared - whole - estimate.activations // 2 - estimate.logits


def test_a_model_of_a_real_size_over_a_thousand_ranks(tmp_path: Path) -> None:
    """Qwen2.5-VL-7B without its weights, split by FSDP2 in the blocks that a trainer splits it in."""
    config = CONFIG_MAPPING["qwen2_5_vl"](
        text_config={"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18944, "vocab_size": 152_064},
        vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
        tie_word_embeddings=False,
    )
    settings = ModelSettings(source=str(tmp_path), gradient_checkpointing=True)
    sizes = geometry(config, settings, TRAINER, "bfloat16")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1024,))
        for module, _ in blocks(model, family_of(config), None):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        parameters = list(model.parameters())
        assert sum(parameter.to_local().numel() for parameter in parameters) == sizes.shard(1024)
    finally:
        dist.destroy_process_group()
    assert sizes.parameters > 8e9 and 1 < 1024 * sizes.shard(1024) / sizes.parameters < 1.2
