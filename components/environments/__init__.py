"""Environments by name. A new one is a class in one file and a line here (or an entry point of the same group).

A class in a file beside a recipe needs neither: it is called "module:Class".
"""

from __future__ import annotations

from armature.components.machine.registry import Registry

ENVIRONMENTS = Registry(
    "environment",
    "armature.environments",
    {
        "alfworld/text": "armature.components.environments.alfworld.text.environment:AlfworldText",
        "alfworld/thor": "armature.components.environments.alfworld.thor.environment:AlfworldThor",
        "colors": "armature.components.environments.colors:Colors",
        "coordinates": "armature.components.environments.coordinates:Coordinates",
        "dataset": "armature.components.environments.dataset.environment:DatasetEnvironment",
        "openenv": "armature.components.environments.openenv:OpenEnvEnvironment",
        "recall": "armature.components.environments.recall:Recall",
        "verifiers": "armature.components.environments.verifiers:VerifiersEnvironment",
    },
    modules=True,
)
