"""Checkpoints of robot policies, in the released layout."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy, save_policy
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import damaged_bytes, damaged_document, dumps
from tests.robots.policies.molmoact2 import released


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    whole = released.write_released(folder / "whole")
    around = {path.name for path in folder.iterdir()} | {"damaged", "saved"}

    def attempt(rng: random.Random) -> bool:
        root = folder / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole, root)
        path = rng.choice([root / "model.safetensors", root / "config.json", *sorted(root.glob("*.*"))])
        if path.suffix == ".json" and rng.random() < 0.8:
            path.write_bytes(dumps(damaged_document(json.loads(path.read_bytes()), rng)))
        else:
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        loaded = load_policy(root, released.SETTINGS)
        save_policy(folder / "saved", loaded.parts, loaded.model.state_dict())
        expect({path.name for path in folder.iterdir()} <= around, "a file was written outside the checkpoint")
        read, written = load_file(root / "model.safetensors"), load_file(folder / "saved/model.safetensors")
        frequencies = next(name for name in read if name.endswith("inv_freq"))
        for name in read.keys() - {frequencies}:
            expect(torch.equal(read[name].nan_to_num(), written[name].nan_to_num()), f"{name} has other values")
        return True

    yield attempt
