"""Armature's public API. Everything else is internal and may change between releases.

Each name is imported when it is first used, so `import armature` loads no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armature.components.artifacts.images import ImageStore, encode_png
    from armature.components.artifacts.videos import FrameSettings, encode_video, read_video
    from armature.components.configuration import Recipe, load_recipe, recipe_names
    from armature.components.configuration.stages import TerminalEvents
    from armature.components.contracts.batches import MultimodalAdapter, MultimodalBatch
    from armature.components.contracts.episodes import EarlierMessage, Environment, Episode, Observation, Outcome, Task
    from armature.components.contracts.errors import ArmatureError, ConfigurationError
    from armature.components.contracts.images import EncodedImage
    from armature.components.contracts.robots import RobotObservation, RobotPolicy
    from armature.components.contracts.rollouts import GenerateOutputs
    from armature.components.contracts.settings import Settings
    from armature.components.environments.generated import GeneratedEnvironment
    from armature.components.environments.make import make_environment
    from armature.components.environments.tools.box import ToolBox
    from armature.components.environments.tools.tool import ToolError
    from armature.components.evaluation.results import EpisodeResult, accuracy, collect_results
    from armature.components.inference.pool import ServerPool
    from armature.components.machine.project import project_path
    from armature.components.models.adapters import get_adapter, validate_batch
    from armature.components.models.tiny.build import make_tiny_checkpoint
    from armature.components.rl.config import MultimodalRLConfig
    from armature.components.rl.trainer import MultimodalGRPOTrainer
    from armature.components.robots.datasets.lerobot.writer import create_dataset
    from armature.components.robots.imitation.settings import VLATrainerSettings
    from armature.components.robots.imitation.trainer import PolicyTrainer
    from armature.components.robots.policies.settings import RobotPolicySettings
    from armature.components.rollouts.batches.table import build_batch
    from armature.components.rollouts.collect import collect
    from armature.components.rollouts.sampler import tasks_of_step
    from armature.components.rollouts.table import read_rollouts
    from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
    from armature.run import run_recipe
    from armature.serve import vllm_server

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
    "EpisodeResult",
    "FrameSettings",
    "GenerateOutputs",
    "GeneratedEnvironment",
    "ImageStore",
    "MultimodalAdapter",
    "MultimodalBatch",
    "MultimodalGRPOTrainer",
    "MultimodalRLConfig",
    "Observation",
    "Outcome",
    "PolicyTrainer",
    "Recipe",
    "RobotObservation",
    "RobotPolicy",
    "RobotPolicySettings",
    "ServerPool",
    "Settings",
    "Task",
    "TerminalEvents",
    "ToolBox",
    "ToolError",
    "TrainerClient",
    "TrainerPolicySettings",
    "VLATrainerSettings",
    "accuracy",
    "build_batch",
    "collect",
    "collect_results",
    "create_dataset",
    "encode_png",
    "encode_video",
    "get_adapter",
    "load_recipe",
    "make_environment",
    "make_tiny_checkpoint",
    "project_path",
    "read_rollouts",
    "read_video",
    "recipe_names",
    "run_recipe",
    "tasks_of_step",
    "validate_batch",
    "vllm_server",
]

# The module that defines each public name.
_MODULES = {
    "ArmatureError": "armature.components.contracts.errors",
    "ConfigurationError": "armature.components.contracts.errors",
    "EarlierMessage": "armature.components.contracts.episodes",
    "EncodedImage": "armature.components.contracts.images",
    "Environment": "armature.components.contracts.episodes",
    "Episode": "armature.components.contracts.episodes",
    "EpisodeResult": "armature.components.evaluation.results",
    "FrameSettings": "armature.components.artifacts.videos",
    "GenerateOutputs": "armature.components.contracts.rollouts",
    "GeneratedEnvironment": "armature.components.environments.generated",
    "ImageStore": "armature.components.artifacts.images",
    "MultimodalAdapter": "armature.components.contracts.batches",
    "MultimodalBatch": "armature.components.contracts.batches",
    "MultimodalGRPOTrainer": "armature.components.rl.trainer",
    "MultimodalRLConfig": "armature.components.rl.config",
    "Observation": "armature.components.contracts.episodes",
    "Outcome": "armature.components.contracts.episodes",
    "PolicyTrainer": "armature.components.robots.imitation.trainer",
    "Recipe": "armature.components.configuration",
    "RobotObservation": "armature.components.contracts.robots",
    "RobotPolicy": "armature.components.contracts.robots",
    "RobotPolicySettings": "armature.components.robots.policies.settings",
    "ServerPool": "armature.components.inference.pool",
    "Settings": "armature.components.contracts.settings",
    "Task": "armature.components.contracts.episodes",
    "TerminalEvents": "armature.components.configuration.stages",
    "ToolBox": "armature.components.environments.tools.box",
    "ToolError": "armature.components.environments.tools.tool",
    "TrainerClient": "armature.components.vlm.client",
    "TrainerPolicySettings": "armature.components.vlm.client",
    "VLATrainerSettings": "armature.components.robots.imitation.settings",
    "accuracy": "armature.components.evaluation.results",
    "build_batch": "armature.components.rollouts.batches.table",
    "collect": "armature.components.rollouts.collect",
    "collect_results": "armature.components.evaluation.results",
    "create_dataset": "armature.components.robots.datasets.lerobot.writer",
    "encode_png": "armature.components.artifacts.images",
    "encode_video": "armature.components.artifacts.videos",
    "get_adapter": "armature.components.models.adapters",
    "load_recipe": "armature.components.configuration",
    "make_environment": "armature.components.environments.make",
    "make_tiny_checkpoint": "armature.components.models.tiny.build",
    "project_path": "armature.components.machine.project",
    "read_rollouts": "armature.components.rollouts.table",
    "read_video": "armature.components.artifacts.videos",
    "recipe_names": "armature.components.configuration",
    "run_recipe": "armature.run",
    "tasks_of_step": "armature.components.rollouts.sampler",
    "validate_batch": "armature.components.models.adapters",
    "vllm_server": "armature.serve",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
