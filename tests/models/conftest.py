"""Tiny checkpoints of every family, built once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from armature.components.families.family import FAMILIES
from armature.components.models.tiny import make_tiny_checkpoint

EVERY_FAMILY = tuple(FAMILIES)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of a family."""
    root, built = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()

    def build(family: str) -> Path:
        if family not in built:
            built[family] = make_tiny_checkpoint(family, root / family, seed=0)
        return built[family]

    return build


@pytest.fixture
def images() -> list[Image.Image]:
    """Two images of different shape."""
    return [Image.new("RGB", (100, 80), (200, 30, 30)), Image.new("RGB", (64, 150), (30, 30, 200))]
