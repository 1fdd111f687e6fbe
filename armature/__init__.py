"""Armature's public API. Everything else is internal and may change between releases.

Each name is imported when it is first used, so `import armature` loads no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armature.run import run_recipe
    from components.adapters import get_adapter, validate_batch
    from components.adapters.base import MultimodalAdapter
    from components.artifacts.images import encode_png
    from components.configuration import Recipe, load_recipe, recipe_names
    from components.contracts.batches import MultimodalBatch
    from components.contracts.episodes import EarlierMessage, Environment, Episode, Observation, Outcome, Task
    from components.contracts.errors import ArmatureError, ConfigurationError
    from components.contracts.images import EncodedImage
    from components.contracts.robots import RobotObservation, RobotPolicy
    from components.contracts.rollouts import GenerateOutputs
    from components.contracts.settings import Settings
    from components.environments.generated import GeneratedEnvironment
    from components.project import project_path
    from components.rl.config import MultimodalRLConfig
    from components.rl.trainer import MultimodalGRPOTrainer

# Before torch is loaded, here and in child programs: with threads that wait spinning, a training step took 15 s instead
# of 2 s on two cores as soon as another process ran.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__all__ = [
    "ArmatureError",
    "ConfigurationError",
    "EarlierMessage",
    "EncodedImage",
    "Environment",
    "Episode",
    "GenerateOutputs",
    "GeneratedEnvironment",
    "MultimodalAdapter",
    "MultimodalBatch",
    "MultimodalGRPOTrainer",
    "MultimodalRLConfig",
    "Observation",
    "Outcome",
    "Recipe",
    "RobotObservation",
    "RobotPolicy",
    "Settings",
    "Task",
    "encode_png",
    "get_adapter",
    "load_recipe",
    "project_path",
    "recipe_names",
    "run_recipe",
    "validate_batch",
]

_MODULES = {
    "ArmatureError": "components.contracts.errors",
    "ConfigurationError": "components.contracts.errors",
    "EarlierMessage": "components.contracts.episodes",
    "EncodedImage": "components.contracts.images",
    "Environment": "components.contracts.episodes",
    "Episode": "components.contracts.episodes",
    "GenerateOutputs": "components.contracts.rollouts",
    "GeneratedEnvironment": "components.environments.generated",
    "MultimodalAdapter": "components.adapters.base",
    "MultimodalBatch": "components.contracts.batches",
    "MultimodalGRPOTrainer": "components.rl.trainer",
    "MultimodalRLConfig": "components.rl.config",
    "Observation": "components.contracts.episodes",
    "Outcome": "components.contracts.episodes",
    "Recipe": "components.configuration",
    "RobotObservation": "components.contracts.robots",
    "RobotPolicy": "components.contracts.robots",
    "Settings": "components.contracts.settings",
    "Task": "components.contracts.episodes",
    "encode_png": "components.artifacts.images",
    "get_adapter": "components.adapters",
    "load_recipe": "components.configuration",
    "project_path": "components.project",
    "recipe_names": "components.configuration",
    "run_recipe": "armature.run",
    "validate_batch": "components.adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
