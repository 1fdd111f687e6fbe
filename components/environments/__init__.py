"""The registry of environments: their names and the classes that implement them.

To add an environment, write its class in one file and add a line here, or register an entry point in the group
`armature.environments`. A class in a file beside a recipe needs neither: the recipe names it "module:Class".
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
        "digits": "armature.components.environments.digits:Digits",
        "dot": "armature.components.environments.dot:Dot",
        "gymnasium": "armature.components.environments.gymnasium:GymnasiumEnvironment",
        "mixture": "armature.components.environments.mixture:MixtureEnvironment",
        "motion": "armature.components.environments.motion:Motion",
        "openenv": "armature.components.environments.openenv:OpenEnvEnvironment",
        "program": "armature.components.environments.program.environment:ProgramEnvironment",
        "reasoning_gym": "armature.components.environments.reasoning_gym:ReasoningGym",
        "recall": "armature.components.environments.recall:Recall",
        "verifiers": "armature.components.environments.verifiers:VerifiersEnvironment",
    },
    modules=True,
)
