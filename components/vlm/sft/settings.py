"""Settings of supervised training on the user's conversations. Torch-free."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import ConfigDict, Field, PositiveInt

from armature.components.contracts.settings import Settings
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
