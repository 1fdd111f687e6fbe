"""Checkpoints of vision-language models."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from armature.components.models.load import load_model, load_processor
from armature.components.models.settings import ModelSettings
from armature.components.models.tiny import make_tiny_checkpoint
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps

SETTINGS = ModelSettings(source="/given/to/the/loader", dtype="float32", attn_implementation="sdpa", freeze=())
WEIGHTS = "model.safetensors"


def facts(tensors: dict[str, torch.Tensor]) -> list[tuple[int, float]]:
    """Return the size and the sum of each floating-point tensor, sorted and without names."""
    saved = {tensor.data_ptr(): tensor for tensor in tensors.values() if tensor.is_floating_point()}
    return sorted((tensor.numel(), float(tensor.double().nan_to_num().sum())) for tensor in saved.values())


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    wholes = [make_tiny_checkpoint(family, folder / family, seed=0) for family in ("qwen2-vl", "llava")]

    def attempt(rng: random.Random) -> bool:
        root = folder / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(rng.choice(wholes), root)
        path = rng.choice([root / WEIGHTS, root / "config.json", *sorted(root.iterdir())])
        if path.suffix == ".json" and rng.random() < 0.8:
            path.write_bytes(dumps(damaged_document(json.loads(path.read_bytes()), rng)))
        else:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        model = load_model(root, SETTINGS)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        expect(facts(parameters) == facts(load_file(root / WEIGHTS)), "the model has other weights than the file")
        load_processor(root, SETTINGS)
        return True

    yield attempt
