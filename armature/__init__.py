"""Armature's public API. Everything else is internal and may change between releases.

Each name is imported when it is first used, so `import armature` loads no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armature.components.artifacts.images import encode_png
    from armature.components.configuration import Recipe, load_recipe, recipe_names
    from armature.components.contracts.batches import MultimodalAdapter, MultimodalBatch
    from armature.components.contracts.episodes import EarlierMessage, Environment, Episode, Observation, Outcome, Task
    from armature.components.contracts.errors import ArmatureError, ConfigurationError
    from armature.components.contracts.images import EncodedImage
    from armature.components.contracts.robots import RobotObservation, RobotPolicy
    from armature.components.contracts.rollouts import GenerateOutputs
    from armature.components.contracts.settings import Settings
    from armature.components.environments.generated import GeneratedEnvironment
    from armature.components.machine.project import project_path
    from armature.components.models.adapters import get_adapter, validate_batch
    from armature.components.rl.config import MultimodalRLConfig
    from armature.components.rl.trainer import MultimodalGRPOTrainer
    from armature.run import run_recipe

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
    "ArmatureError": "armature.components.contracts.errors",
    "ConfigurationError": "armature.components.contracts.errors",
    "EarlierMessage": "armature.components.contracts.episodes",
    "EncodedImage": "armature.components.contracts.images",
    "Environment": "armature.components.contracts.episodes",
    "Episode": "armature.components.contracts.episodes",
    "GenerateOutputs": "armature.components.contracts.rollouts",
    "GeneratedEnvironment": "armature.components.environments.generated",
    "MultimodalAdapter": "armature.components.contracts.batches",
    "MultimodalBatch": "armature.components.contracts.batches",
    "MultimodalGRPOTrainer": "armature.components.rl.trainer",
    "MultimodalRLConfig": "armature.components.rl.config",
    "Observation": "armature.components.contracts.episodes",
    "Outcome": "armature.components.contracts.episodes",
    "Recipe": "armature.components.configuration",
    "RobotObservation": "armature.components.contracts.robots",
    "RobotPolicy": "armature.components.contracts.robots",
    "Settings": "armature.components.contracts.settings",
    "Task": "armature.components.contracts.episodes",
    "encode_png": "armature.components.artifacts.images",
    "get_adapter": "armature.components.models.adapters",
    "load_recipe": "armature.components.configuration",
    "project_path": "armature.components.machine.project",
    "recipe_names": "armature.components.configuration",
    "run_recipe": "armature.run",
    "validate_batch": "armature.components.models.adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
