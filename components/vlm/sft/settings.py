"""Settings of supervised training on the user's conversations, and the recipe of the flow `sft`. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import ConfigDict, Field, PositiveInt

from armature.components.configuration.recipes import MachineSection, Sections
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact
from armature.components.environments.dataset.settings import ColumnName, TableSettings
from armature.components.models.settings import ModelSettings
from armature.components.vlm.settings import SupervisedSettings


class ConversationSettings(TableSettings):
    """The user's conversations: a table with a column of messages in the format of Hugging Face and OpenAI.

    The source may also be MODULE:FUNCTION, a function without arguments that returns a `datasets.Dataset` or any other
    rows, in a file beside the recipe or in an installed package.

    Example:
        >>> data = ConversationSettings(source="chats.jsonl")
        >>> data.messages, data.tools, data.split.heldout
        ('messages', 'tools', 0.1)
    """

    model_config = ConfigDict(title="Conversations")

    messages: ColumnName = "messages"
    """Column with the conversation: a list of messages with role, content and, for tools, tool_calls."""
    tools: ColumnName = "tools"
    """Column with the JSON schemas of the tools that the model may call; rows without it have none."""
    on_bad_row: Literal["refuse", "skip"] = "skip"
    """skip: leave rows out that cannot be used, and count them by reason. refuse: fail if there is one."""
    max_characters: PositiveInt = Field(2**18, le=2**22)
    """Most characters of a row's messages together."""

    @property
    def function(self) -> str | None:
        """The name MODULE:FUNCTION if the source is a function, else None."""
        return self.source if re.fullmatch(r"[A-Za-z_][\w.]+:[A-Za-z_]\w*", self.source) else None


class ConversationsStageSettings(Settings):
    """The sections of a recipe on which the tokens of its conversations depend."""

    model: ModelSettings
    data: ConversationSettings


class SupervisedStageSettings(Settings):
    """The sections of a recipe on which the trained checkpoint depends, besides its conversations."""

    model: ModelSettings
    trainer: SupervisedSettings


class Sft(Sections):
    """Recipe: train a model on the assistant's tokens of the user's conversations."""

    FLOW = "armature.flows.sft.sft"
    JOINED = (ConversationsStageSettings, SupervisedStageSettings)
    FIRST_STAGES = ("model",)

    model: ModelSettings
    """Where the weights come from and which of them are trained."""
    data: ConversationSettings
    """The conversations, and which of them are held out."""
    trainer: SupervisedSettings
    """Optimizer, epochs and micro-batches."""
    machine: MachineSection = Machine()

    def refuse_sources(self) -> None:
        """Refuse a model name that cannot be fetched: a missing folder, or a hub name without a revision."""
        from armature.components.machine.project import project_source
        from armature.components.models.source import check_source_name

        if self.model.tiny is None:
            check_source_name(project_source(self.model.source), self.model.revision)

    def refuse_ahead(self) -> None:
        """Refuse a source of conversations that does not exist."""
        from armature.components.vlm.sft.conversations import refuse_missing

        refuse_missing(self.data)

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        """Print the first conversation that can be trained on, with its trained tokens marked."""
        from armature.components.vlm.sft.conversations import example_lines

        for line in example_lines(ConversationsStageSettings(model=self.model, data=self.data), inputs["model"].path):
            say(line)
