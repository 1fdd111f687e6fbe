"""Where a dataset's rows are, which of its columns mean what, and how it is split and graded."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from armature.components.contracts.secrets import refuse_plain_url
from armature.components.contracts.settings import Settings
from armature.components.environments.dataset.template import column_name, parse_template
from armature.components.rewards.reward import EXTRACT, RewardSettings

Format = Literal["jsonl", "json", "csv", "parquet", "images", "huggingface"]
Scalar = bool | int | float | str


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) and value else value or ()


def _same_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(column_name, names))


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Labels = Annotated[Names, AfterValidator(_same_names)]
"""Columns, or values of one: compared as they look."""
ColumnName = Annotated[str, AfterValidator(column_name)]


class HashSplit(Settings):
    """A share of the rows is held out: which ones depends on what is in a row, not on its place nor on a seed."""

    by: Literal["hash"]
    """A share of the rows."""
    heldout: float = Field(0.1, gt=0, lt=1)
    """Share of the rows that is held out."""
    of: Names = ()
    """Splits of a Hugging Face dataset, or files or folders below the source, that have the rows; globs for files.
    Empty: all; of a dataset with several splits some have to be named."""
    group: ColumnName = ""
    """Column whose equal values stay in one split, such as the image that several questions are about; empty: rows with
    the same prompt and images do."""


class ColumnSplit(Settings):
    """A column says it. Rows with any other value are left out and counted."""

    by: Literal["column"]
    """A column's values."""
    column: ColumnName = "split"
    """The column."""
    train: Labels = Field(("train",), min_length=1)
    """Its values in rows to train on."""
    heldout: Labels = Field(("test",), min_length=1)
    """Its values in held-out rows."""


class NameSplit(Settings):
    """Each split has its own files or folders below the source, or its own splits of a Hugging Face dataset."""

    by: Literal["name"]
    """Names of files, folders or splits."""
    train: Names = Field(("train",), min_length=1)
    """Names to train on; globs for files: train-*.parquet."""
    heldout: Names = Field(("test",), min_length=1)
    """Names that are held out."""


SplitSettings = Annotated[HashSplit | ColumnSplit | NameSplit, Field(discriminator="by")]


class FilterSettings(Settings):
    """Rows that pass have a value in `column` for which this holds; one that is null does not pass."""

    column: ColumnName
    """The column."""
    operator: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]
    """How it is compared."""
    value: Scalar | tuple[Scalar, ...]
    """With what; in and not in take a list. A number is compared with numbers, a text with texts."""

    @model_validator(mode="after")
    def _lists_are_for_in(self) -> Self:
        if isinstance(self.value, tuple) != (self.operator in ("in", "not in")):
            raise ValueError(f"{self.operator} takes {'a list' if 'in' in self.operator else 'one value'}")
        return self


class DatasetEnvironmentSettings(Settings):
    """Rows of a table become tasks of one turn: a prompt with images, and an answer that rewards compare with."""

    source: Annotated[str, BeforeValidator(refuse_plain_url)] = Field(min_length=1)
    """A file, a glob or a folder of files, a folder of images, a saved Hugging Face dataset, the name of one on the hub
    (owner/name), or a URL (s3://bucket/rows.jsonl)."""
    format: Format | None = None
    """How the source is read; None: as its names and suffixes say."""
    revision: str | None = None
    """Commit, tag or branch; needed for a hub name."""
    subset: str = ""
    """The configuration of a hub dataset that has several; empty for none."""
    root: Annotated[str, BeforeValidator(refuse_plain_url)] = ""
    """Folder or URL that paths of images are below; empty: that of the source's files."""
    prompt: str = ""
    """What is asked: text with {column}s, and {image} where the row's next image stands, {images} for all that are
    left; without either, images come first. {column[0]} is the first of a list. Write {{ and }} for braces, and
    {"NAME"}, a JSON string, for a column whose name has braces or brackets or is image."""
    system: str = ""
    """The system message, a template as well but without images; empty for none."""
    conversation: ColumnName = ""
    """Column with chat messages (role and content) in place of a prompt; the model writes the last message. One of the
    assistant at the end is the answer, unless a column is."""
    images: Labels = ()
    """Columns with a row's images, one or several in each, in their order."""
    image_token: str = ""
    """Text in columns that stands for the row's next image, such as <image>; empty for none."""
    answer: ColumnName = ""
    """Column with the answer, which rewards are given; empty if they need none."""
    answer_extract: str = Field("all", pattern=EXTRACT)
    """What of that column is the answer, as for rewards: all, boxed, <answer> for what is between the last such tag and
    its end, </think> for what follows the last of it."""
    kind: ColumnName = ""
    """Column to break accuracy down by, with evaluation.kind_field = "kind"; empty for none."""
    demonstration: str = ""
    """What a warm start has the model say, a template: <think>{solution}</think>{answer}; empty: the answer."""
    split: SplitSettings = HashSplit(by="hash")
    """Which rows are held out."""
    filters: tuple[FilterSettings, ...] = ()
    """Only rows that pass all of them are used."""
    shuffle: bool = True
    """Whether environment.seed orders the rows, and so says which are the first train_tasks."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Rows that cannot be used: refuse to start, or skip and count them by reason."""
    check_images: bool = True
    """Whether the images of every task are opened before the start; false for tables whose images are too many to read:
    a damaged one then costs its rollouts, which are counted."""
    reserved_tokens: tuple[str, ...] = ()
    """Texts that no row may have where the model reads them. The special tokens of the recipe's model, such as
    <|image_pad|>, are added when the tasks are listed."""
    allow_special_tokens: bool = False
    """Whether rows may have those special tokens of the model that do not stand for images: they only change the
    conversation, as <|im_end|> does, which ends a turn."""
    max_characters: PositiveInt = Field(32768, le=2**20)
    """Most characters of a row's prompt, system text and answer, all together."""
    rewards: tuple[RewardSettings, ...] = Field(min_length=1)
    """How an answer is graded, by name and weight: [{name = "exact_match"}]."""

    @field_validator("prompt", "system", "demonstration")
    @classmethod
    def _is_a_template(cls, text: str) -> str:
        parse_template(text)
        return text

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        if bool(self.prompt) == bool(self.conversation):
            raise PydanticCustomError(
                "prompt_or_conversation", "give either prompt, a template, or conversation, a column"
            )
        for key in ("system", "demonstration"):
            if parse_template(getattr(self, key)).places:
                raise PydanticCustomError(
                    "image_place_unused", f"{key} has a place for an image; only the prompt shows images"
                )
        if parse_template(self.prompt).places and not self.images:
            raise PydanticCustomError(
                "image_columns_missing", "prompt has a place for an image: name the column with the images in images"
            )
        if self.conversation and self.system:
            raise PydanticCustomError(
                "two_system_messages", "a conversation has its own system message: give one of conversation and system"
            )
        return self
