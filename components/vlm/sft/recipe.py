"""The recipe of the flow `sft`: its sections, and the check before a run. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from armature.components.configuration.recipes import MachineSection, Sections
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.models.settings import ModelSettings
from armature.components.vlm.settings import SupervisedSettings
from armature.components.vlm.sft.conversations import example_lines, refuse_missing
from armature.components.vlm.sft.settings import (
    ConversationSettings,
    ConversationsStageSettings,
    DPOSettings,
    SupervisedStageSettings,
)


class Sft(Sections):
    """Recipe: train a model on the assistant's tokens of the user's conversations, or on pairs of answers."""

    FLOW = "armature.flows.sft.sft"
    JOINED = (ConversationsStageSettings, SupervisedStageSettings)
    FIRST_STAGES = ("model",)

    model: ModelSettings
    """The source of the weights, and the ones that are trained."""
    data: ConversationSettings
    """The conversations, and which of them are held out."""
    trainer: SupervisedSettings
    """Optimizer, epochs and micro-batches."""
    machine: MachineSection = Machine()
    dpo: DPOSettings | None = None
    """Direct preference optimization on the pairs that data.pairs names; omit it to train on conversations."""

    @model_validator(mode="after")
    def _pairs_for_dpo(self) -> Self:
        if (self.data.pairs is None) != (self.dpo is None):
            raise PydanticCustomError(
                "pairs_without_dpo", "data.pairs and the section dpo need each other: set both, or leave both out"
            )
        return self

    def refuse_sources(self) -> None:
        """Refuse a model name that cannot be fetched: a missing folder, or a hub name without a revision."""
        from armature.components.models.gguf import model_source
        from armature.components.models.source import check_source_name

        if self.model.tiny is None:
            check_source_name(model_source(self.model.source), self.model.revision)

    def refuse_ahead(self) -> None:
        """Refuse a source of conversations that does not exist."""
        refuse_missing(self.data)

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        """Print the first conversation that can be trained on, with its trained tokens marked."""
        for line in example_lines(ConversationsStageSettings(model=self.model, data=self.data), inputs["model"].path):
            say(line)
