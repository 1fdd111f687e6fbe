"""The tiny policy of most tests in this folder, and an image store."""

from __future__ import annotations

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy
from tests.robots.rl.kitchen import calm_policy


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return calm_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("images"))
