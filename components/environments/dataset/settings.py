"""Settings of the environment `dataset`: the source, the meaning of columns, the split and the rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from armature.components.artifacts.videos import FrameSettings
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
"""Names of columns, or values of a column, in Unicode's normal form NFC, so that names which look equal are equal."""
ColumnName = Annotated[str, AfterValidator(column_name)]


class HashSplit(Settings):
    """Hold out a share of the rows by a hash of their content, independent of their position and of any seed."""

    by: Literal["hash"]
    """hash: hold out a share of the rows."""
    heldout: float = Field(0.1, gt=0, lt=1)
    """Share of the rows to hold out."""
    of: Names = ()
    """Splits of a Hugging Face dataset, or files or folders below the source, to take rows from; files may be globs.
    Empty takes all. A dataset with several splits needs at least one name."""
    group: ColumnName = ""
    """Column whose equal values stay in one split, such as the image that several questions share. Empty keeps rows
    with equal prompt and images together."""


class ColumnSplit(Settings):
    """Split by the values of a column. Rows with other values are left out and counted."""

    by: Literal["column"]
    """column: split by the values of a column."""
    column: ColumnName = "split"
    """Column that holds the split's name."""
    train: Labels = Field(("train",), min_length=1)
    """Values of the column in training rows."""
    heldout: Labels = Field(("test",), min_length=1)
    """Values of the column in held-out rows."""


class NameSplit(Settings):
    """Split by files or folders below the source, or by the splits of a Hugging Face dataset."""

    by: Literal["name"]
    """name: split by names of files, folders or splits."""
    train: Names = Field(("train",), min_length=1)
    """Names to train on; files may be globs: train-*.parquet."""
    heldout: Names = Field(("test",), min_length=1)
    """Names to hold out; files may be globs."""


SplitSettings = Annotated[HashSplit | ColumnSplit | NameSplit, Field(discriminator="by")]


class FilterSettings(Settings):
    """A condition on a column. A row with null in that column does not pass."""

    column: ColumnName
    """Column to compare."""
    operator: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]
    """Comparison of the column with value."""
    value: Scalar | tuple[Scalar, ...]
    """Value to compare with; a list for in and not in. The column is read as a number if this is a number, as text if
    it is text."""

    @model_validator(mode="after")
    def _check_list(self) -> Self:
        if isinstance(self.value, tuple) != (self.operator in ("in", "not in")):
            raise ValueError(f"{self.operator} takes {'a list' if 'in' in self.operator else 'one value'}")
        return self


class TableSettings(Settings):
    """Settings of a table of rows: its source, its columns with images, the split, and the rows to leave out."""

    source: Annotated[str, BeforeValidator(refuse_plain_url)] = Field(min_length=1)
    """A file, a glob, a folder of files, a folder of images, a saved Hugging Face dataset, the name of a dataset on the
    hub (owner/name), or a URL (s3://bucket/rows.jsonl)."""
    format: Format | None = None
    """Format of the source; unset derives it from file names and suffixes."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the hub, which needs one."""
    subset: str = ""
    """Configuration of a hub dataset that has several; empty for none."""
    root: Annotated[str, BeforeValidator(refuse_plain_url)] = ""
    """Folder or URL to which paths of images are relative; empty means the folder of the source's files."""
    images: Labels = ()
    """Columns with the row's images, in order; a column may hold one image or a list."""
    frames: FrameSettings = FrameSettings()
    """Frames that are read from videos, which columns of images may hold too."""
    image_token: str = ""
    """Text in columns that stands for the row's next image, such as <image>; empty for none."""
    split: SplitSettings = HashSplit(by="hash")
    """Division into training and held-out rows."""
    filters: tuple[FilterSettings, ...] = ()
    """Conditions on columns; rows have to pass all of them."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """refuse: fail if any row cannot be used. skip: leave such rows out and count them by reason."""
    allow_special_tokens: bool = False
    """True allows the model's special tokens in rows, except those that stand for images. They change the conversation:
    <|im_end|>, for example, ends a turn."""
    max_characters: PositiveInt = Field(32768, le=2**20)
    """Most characters of a row's prompt, system message and answer together."""


class DatasetEnvironmentSettings(TableSettings):
    """Settings of the environment `dataset`. Each row of a table becomes a task of one turn: a prompt and an answer.

    Example:
        >>> settings = DatasetEnvironmentSettings(
        ...     source="questions.jsonl", prompt="{image}{question}", images="photo", answer="answer",
        ...     rewards=[{"name": "exact_match"}],
        ... )
        >>> settings.images, settings.split.heldout
        (('photo',), 0.1)
    """

    prompt: str = ""
    """Template of the user's message. {column} is a column's value and {column[0]} the first item of a list; {image} is
    the row's next image and {images} all remaining ones. Without either, images come first. {{ and }} are braces.
    {"NAME"}, a JSON string, is the column of a name that has braces or brackets or is image."""
    system: str = ""
    """Template of the system message, without images; empty for none."""
    conversation: ColumnName = ""
    """Column with chat messages (role and content) to use instead of prompt. The model continues after the user's last
    message; a last message of the assistant is the answer, unless the setting answer names a column."""
    answer: ColumnName = ""
    """Column with the correct answer for the rewards; empty if they need none."""
    answer_extract: str = Field("all", pattern=EXTRACT)
    """Part of the answer column to use as the correct answer, as for rewards: all, boxed, <answer> for the text inside
    the last such tag, </think> for the text after the last such tag."""
    kind: ColumnName = ""
    """Column by which evaluation breaks accuracy down; empty for none."""
    demonstration: str = ""
    """Template of the answer that a warm start trains on: <think>{solution}</think>{answer}. Empty means the answer."""
    shuffle: bool = True
    """True orders the rows by environment.seed, which also selects the first train_tasks; false keeps their order."""
    check_images: bool = True
    """True opens the images of every task before the start. Set false if reading all of them takes too long; the
    rollouts of a damaged image then fail and are counted."""
    reserved_tokens: tuple[str, ...] = ()
    """Texts that may not appear in what the model reads. The special tokens of the recipe's model, such as
    <|image_pad|>, are added when the tasks are listed."""
    rewards: tuple[RewardSettings, ...] = Field(min_length=1)
    """Rewards that grade an answer, by name and weight: [{name = "exact_match"}]."""

    @field_validator("prompt", "system", "demonstration")
    @classmethod
    def _check_template(cls, text: str) -> str:
        parse_template(text)
        return text

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if bool(self.prompt) == bool(self.conversation):
            raise PydanticCustomError(
                "prompt_or_conversation", "set exactly one of prompt (a template) and conversation (a column)"
            )
        for key in ("system", "demonstration"):
            if parse_template(getattr(self, key)).places:
                raise PydanticCustomError(
                    "image_place_unused", f"{key} has a place for an image; only the prompt shows images"
                )
        if parse_template(self.prompt).places and not self.images:
            raise PydanticCustomError(
                "image_columns_missing", "prompt has a place for an image: set images to the columns that hold images"
            )
        if self.conversation and self.system:
            raise PydanticCustomError(
                "two_system_messages", "a conversation contains its own system message: remove system"
            )
        return self
