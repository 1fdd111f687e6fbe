from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from armature.components.configuration.stages import STAGES
from armature.components.contracts.machine import Machine
from tests.builders import make_machine


@pytest.fixture(scope="session")
def demo_stages() -> Iterator[ModuleType]:
    """The module demo_stages.py, whose stages are registered by name, as another package would register its stages."""
    spec = importlib.util.spec_from_file_location("demo_stages", Path(__file__).with_name("demo_stages.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_stages"] = module
    spec.loader.exec_module(module)
    names = {"demo-tasks": "TASKS", "demo-train": "TRAIN", "demo-evaluate": "EVALUATE"}
    STAGES._entries.update({name: f"demo_stages:{attribute}" for name, attribute in names.items()})
    yield module
    for name in names:
        del STAGES._entries[name]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return make_machine(store=tmp_path / "store")
