"""Settings of supervised training on the user's conversations. Torch-free."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.settings import Settings
from armature.components.environments.dataset.settings import ColumnName, TableSettings
from armature.components.models.settings import ModelSettings
from armature.components.vlm.settings import SupervisedSettings


class PairColumns(Settings):
    """Columns of pairs, which are two answers to the same beginning, each a list of messages."""

    prompt: ColumnName = "prompt"
    """Column with the messages before both answers. Rows without it, or with a text in it, have whole conversations in
    both other columns; the messages with which both begin are then the prompt."""
    chosen: ColumnName = "chosen"
    """Column with the better answer, or the conversation that ends with it."""
    rejected: ColumnName = "rejected"
    """Column with the worse answer, or the conversation that ends with it."""


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
    pairs: PairColumns | None = None
    """Columns of pairs of a better and a worse answer, to be used instead of messages; needs the section dpo. `{}` are
    the columns prompt, chosen and rejected."""
    tools: ColumnName = "tools"
    """Column with the JSON schemas of the tools that the model may call; rows without it have none."""
    on_bad_row: Literal["refuse", "skip"] = "skip"
    """skip: leave rows out that cannot be used, and count them by reason. refuse: fail if there is one."""
    max_characters: PositiveInt = Field(2**18, le=2**22)
    """Most characters of a row's messages together."""

    @model_validator(mode="after")
    def _one_kind_of_rows(self) -> Self:
        if self.pairs is not None and self.messages != "messages":
            raise PydanticCustomError("without_effect", "messages has no effect with pairs: leave one of both out")
        return self

    @property
    def function(self) -> str | None:
        """The name MODULE:FUNCTION if the source is a function, else None."""
        return self.source if re.fullmatch(r"[A-Za-z_][\w.]+:[A-Za-z_]\w*", self.source) else None


class ConversationsStageSettings(Settings):
    """The sections of a recipe on which the tokens of its conversations depend."""

    model: ModelSettings
    data: ConversationSettings


class DPOSettings(Settings):
    """Direct preference optimization on pairs. The trainer's settings that count sequences then count pairs."""

    model_config = ConfigDict(title="Preferences")

    beta: PositiveFloat = 0.1
    """Strength with which the model is kept near the initial one: the reward of an answer is beta times the difference
    of its log-prob from its log-prob under the initial model."""


class SupervisedStageSettings(Settings):
    """The sections of a recipe on which the trained checkpoint depends, besides its conversations."""

    model: ModelSettings
    trainer: SupervisedSettings
    dpo: DPOSettings | None = None
