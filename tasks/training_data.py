"""What a policy is trained on: the dataset that is named, or demonstrations that are recorded for it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.tasks.run_stage import run


def training_data(sections: Mapping[str, BaseModel], machine: Machine) -> Artifact:
    """The artifact of the stage `dataset`, with what is there now, or that of `demonstrations`."""
    return run("dataset" if "dataset" in sections else "demonstrations", sections, machine)
