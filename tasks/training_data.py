"""What a policy is trained on: the dataset that is named, or demonstrations that are recorded for it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.contracts.stages import Artifact
from components.datasets.settings import DatasetSettings
from components.datasets.source import pinned
from tasks.run_stage import run


def training_data(sections: Mapping[str, BaseModel], machine: Machine) -> Artifact:
    """The artifact of the stage `dataset`, with what is there now, or that of `demonstrations`.

    Raises:
        ConfigurationError: none of the two is named, or both are, or demonstrations without their layout.
    """
    dataset = sections.get("dataset")
    if (dataset is None) == ("demonstrations" not in sections):
        raise ConfigurationError(
            "a policy is trained on a dataset or on demonstrations, and "
            f"{'neither is' if dataset is None else 'both are'} given",
            where="dataset, demonstrations",
            remedy="keep one of the two sections",
        )
    if dataset is not None:
        assert isinstance(dataset, DatasetSettings)
        return run("dataset", {"dataset": pinned(dataset)}, machine)
    if "layout" not in sections:
        raise ConfigurationError("demonstrations need a layout", where="layout", remedy="add the section layout")
    return run("demonstrations", sections, machine)
