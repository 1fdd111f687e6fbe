"""Environments by name. A new one is a class in one file and a line here (or an entry point of the same group).

A class in a file beside a recipe needs neither: it is called "module:Class".
"""

from __future__ import annotations

from components.registry import Registry

ENVIRONMENTS = Registry(
    "environment",
    "armature.environments",
    {
        "alfworld/text": "components.environments.alfworld.text.environment:AlfworldText",
        "alfworld/thor": "components.environments.alfworld.thor.environment:AlfworldThor",
        "colors": "components.environments.colors:Colors",
        "coordinates": "components.environments.coordinates:Coordinates",
        "dataset": "components.environments.dataset.environment:DatasetEnvironment",
        "openenv": "components.environments.openenv:OpenEnvEnvironment",
        "recall": "components.environments.recall:Recall",
        "verifiers": "components.environments.verifiers:VerifiersEnvironment",
    },
    modules=True,
)
