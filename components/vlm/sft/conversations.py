"""The stage `conversations`: the rows of the user's table as trajectories, as if a policy had written the answers.

From there on they are trained on as demonstrations are. A pair of answers is a group of two trajectories.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armature.components.artifacts.sources import code_digest
from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import ArmatureError, DataError
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.environments.dataset.bad_rows import BadRow, BadRows
from armature.components.environments.dataset.files import DataFiles
from armature.components.environments.dataset.select import check_filter, split_of
from armature.components.environments.dataset.settings import ColumnSplit
from armature.components.environments.dataset.shards import Row
from armature.components.environments.dataset.source import (
    RowTable,
    image_names,
    open_table,
    refuse_missing_source,
    table_at_commit,
)
from armature.components.machine.project import find_module, load_object
from armature.components.vlm.sft.chats import ChatRow, chat_pair, chat_row
from armature.components.vlm.sft.settings import ConversationSettings, ConversationsStageSettings

if TYPE_CHECKING:
    from armature.components.vlm.sft.turns import TurnWriter

KIND = "conversations"
CHOSEN, REJECTED = "chosen", "rejected"
"""Ends of the trajectory ids of a pair."""
REPEATED = re.compile(r"(<[^<>]{1,40}>)\1+")
"""A token in angle brackets that repeats."""


@contextmanager
def _named_data() -> Iterator[None]:
    """Name the section `data` in errors of the table, which is `environment.args` for an environment."""
    try:
        yield
    except ArmatureError as error:
        where, remedy = (text.replace("environment.args", "data") for text in (error.where, error.remedy))
        raise type(error)(error.what, code=error.code, where=where, remedy=remedy) from error


@contextmanager
def opened(settings: ConversationSettings) -> Iterator[tuple[RowTable, ConversationSettings]]:
    """Open the table of conversations. Rows of a function are written to a temporary table first.

    Raises:
        ConfigurationError, DataError: see `open_table` and `write_rows`.
    """
    with tempfile.TemporaryDirectory(prefix="rows-") as folder, _named_data():
        if settings.function is not None:
            # It imports pandas, for which every reader of recipes, such as `armature list`, would wait.
            from armature.components.environments.dataset.python_rows import write_rows

            write_rows(load_object(settings.function, "source of conversations")(), Path(folder), "train")
            settings = settings.model_copy(update={"source": f"{folder}/train.jsonl", "format": "jsonl"})
        yield open_table(settings), settings


def refuse_missing(settings: ConversationSettings) -> None:
    """Check that the source exists, without reading it.

    Raises:
        ConfigurationError: there is no such function, or a hub name has no revision.
        DataError: the file or folder does not exist.
    """
    with _named_data():
        if settings.function is None:
            refuse_missing_source(settings)
        else:
            load_object(settings.function, "source of conversations")


def read_rows(
    table: RowTable, settings: ConversationSettings, bad: BadRows
) -> Iterator[tuple[str, str, tuple[ChatRow, ...] | BadRow]]:
    """Yield place, split and conversation, or the two of a pair, of each row; a bad row has no split.

    Args:
        bad: counts the rows that are left out.
    """
    count = 0
    messages = [settings.messages] if settings.pairs is None else list(settings.pairs.model_dump().values())
    named = [*messages, settings.tools, *settings.images, *(each.column for each in settings.filters)]
    split = settings.split
    wanted = {*named, split.column if isinstance(split, ColumnSplit) else getattr(split, "group", "")}
    for name, split_of_shard in table.splits(settings).items():
        for index, row in enumerate(table.shards[name].scan(wanted)):
            place, count = f"{name}, row {index}", count + 1
            try:
                chats, chosen = _read_row(row, settings, split_of_shard)
                yield place, chosen, chats
            except BadRow as left_out:
                bad.add(place, left_out)
                yield place, "", left_out
    bad.check(count)


def _read_row(row: Row | BadRow, settings: ConversationSettings, split: str | None) -> tuple[tuple[ChatRow, ...], str]:
    if isinstance(row, BadRow):
        raise row
    for each in settings.filters:
        check_filter(row.get(each.column), each)
    chats = (chat_row(row, settings),) if settings.pairs is None else chat_pair(row, settings, settings.pairs)
    return chats, split or split_of(row, chats[0].key, settings)


# --- The stage ---


def turn_writer(settings: ConversationsStageSettings, model: Path, images: Path) -> TurnWriter:
    """Return the writer of turns for the model in an artifact's folder.

    Raises:
        DataError: the processor cannot be loaded.
    """
    from armature.components.artifacts.images import ImageStore
    from armature.components.models.load import load_processor
    from armature.components.models.source import locate
    from armature.components.vlm.sft.turns import TurnWriter, stop_tokens

    weights = locate(model, settings.model.revision)
    processor = load_processor(weights, settings.model)
    stops = stop_tokens(weights, processor.tokenizer)
    return TurnWriter(processor, stops, ImageStore(images), settings.data.frames)


def reserved_texts(settings: ConversationsStageSettings) -> Callable[[ChatRow], None]:
    """Return a check that no text of a conversation has a special token of the model; it raises a BadRow."""
    from armature.components.models.reserved_tokens import reserved_tokens

    tokens = reserved_tokens(settings.model, images_only=settings.data.allow_special_tokens)

    def check(chat: ChatRow) -> None:
        for text in chat.texts:
            if special := [token for token in tokens if token in text]:
                raise BadRow("reserved_token", f"a text has {special[0]!r}, which the model reads as a special token")

    return check


def trajectories_of(
    chats: tuple[ChatRow, ...], writer: TurnWriter, files: DataFiles, name: str, place: str, split: str
) -> list[Trajectory]:
    """Return the trajectory of a conversation, or the chosen and the rejected trajectory of a pair.

    Raises:
        BadRow: see `TurnWriter.turns`; or both answers of a pair have the same tokens.
    """
    ends = [""] if len(chats) == 1 else [f"-{CHOSEN}", f"-{REJECTED}"]
    made = [
        Trajectory(name + end, name, KIND, place, split, tuple(writer.turns(chat, files)), False)
        for end, chat in zip(ends, chats, strict=True)
    ]
    tokens = [[turn.completion_token_ids.tolist() for turn in each.turns] for each in made]
    if len(chats) == 2 and tokens[0] == tokens[1]:
        raise BadRow("equal_answers", "the template writes both answers with the same tokens")
    return made


def write_conversations(
    settings: ConversationsStageSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Write each usable row as a trajectory with a turn for each answer, or as two of a pair, and all others as
    failures.

    Raises:
        ConfigurationError, DataError: see `open_table`; or no row is left to train on.
    """
    from armature.components.rollouts.table import write_rollouts
    from armature.components.vlm.sft.demonstrate import one_thread

    writer = turn_writer(settings, inputs["model"].path, context.images)
    check = reserved_texts(settings)
    bad = BadRows(f"source {settings.data.source!r}", settings.data.on_bad_row)
    made: list[Trajectory] = []
    failures: list[Failure] = []
    with opened(settings.data) as (table, data), one_thread():
        for number, (place, split, chats) in enumerate(read_rows(table, data, bad)):
            name = f"{number:06d}"
            try:
                if isinstance(chats, BadRow):
                    raise chats
                for chat in chats:
                    check(chat)
                made += trajectories_of(chats, writer, table.files, name, place, split)
            except BadRow as left_out:
                if left_out is not chats:
                    bad.add(place, left_out)
                failures.append(Failure(name, name, place, left_out.reason, left_out.detail))
            if number % 100 == 99:
                context.events.message(f"conversations: {number + 1} rows read")
    if not any(each.split == "train" for each in made):
        first = f"; the first one is {failures[0].task_id}: {failures[0].detail}" if failures else ""
        raise DataError(
            f"no conversation is left to train on; left out: {dict(bad.left_out)}{first}",
            code="no_conversation_usable",
            where=f"data.source = {settings.data.source!r}",
            remedy="correct the rows, or check data.split and data.filters",
        )
    if bad.left_out:
        context.events.message(f"conversations: rows left out: {dict(bad.left_out)}")
    write_rollouts(out, GenerateOutputs(made, failures))
    rows = {split: len({each.group_id for each in made if each.split == split}) for split in ("train", "heldout")}
    return StageReport(rows=rows, drops=dict(bad.left_out))


def sources(settings: ConversationsStageSettings, inputs: Mapping[str, Artifact]) -> dict[str, str]:
    """Return digests of the table and of the images that are files, or of the code of the function that makes rows.

    Raises:
        ConfigurationError, DataError: see `open_table`.
    """
    data = settings.data
    if data.function is not None:
        module = data.function.partition(":")[0]
        find_module(module)
        return {"rows": code_digest(module)}
    with opened(data) as (table, _):

        def paths() -> Iterator[str]:
            everything = data.model_copy(update={"on_bad_row": "skip"})
            for _, _, chats in read_rows(table, everything, BadRows("", "skip")):
                if not isinstance(chats, BadRow):
                    yield from (path for chat in chats for image in chat.images for path in image.files)

        used = data.model_dump(mode="json", exclude={"on_bad_row"})
        return {"data": table.digest, "images": table.files.digest(image_names(table, used, paths))}


def resolved(
    settings: ConversationsStageSettings, inputs: Mapping[str, Artifact], say: Callable[[str], None]
) -> ConversationsStageSettings:
    """Return the settings with the commit in place of a branch or tag of a dataset on the hub."""
    if settings.data.function is not None:
        return settings
    return settings.model_copy(update={"data": table_at_commit(settings.data, say)})


CONVERSATIONS_STAGE = Stage(KIND, 1, ConversationsStageSettings, ("model",), write_conversations, sources, resolved)


def example_lines(settings: ConversationsStageSettings, model: Path) -> Iterator[str]:
    """Yield lines that show the first usable conversation or pair, with the trained tokens between ⟦ and ⟧.

    Args:
        model: folder of the model's artifact.

    Raises:
        ConfigurationError, DataError: see `open_table`; or no row is usable.
    """
    from armature.components.models.adapters import get_adapter
    from armature.components.models.source import locate

    bad = BadRows(f"source {settings.data.source!r}", "skip")
    check = reserved_texts(settings)
    with opened(settings.data) as (table, data), tempfile.TemporaryDirectory() as images:
        writer = turn_writer(settings, model, Path(images))
        adapter = get_adapter(locate(model, settings.model.revision), writer.processor, writer.images.open)
        for place, split, chats in read_rows(table, data, bad):
            try:
                if isinstance(chats, BadRow):
                    raise chats
                for chat in chats:
                    check(chat)
                samples, drops = adapter.samples(
                    GenerateOutputs(trajectories_of(chats, writer, table.files, "", place, split))
                )
            except BadRow as left_out:
                yield f"{place}: left out, {left_out}"
                continue
            yield f"{place}: trained tokens are between ⟦ and ⟧" + f"; turns left out: {dict(drops)}" * bool(drops)
            yield from (marked_text(sample, writer.processor.tokenizer) for sample in samples)
            return
    raise DataError("no row can be trained on", code="no_conversation_usable", where=f"data.source = {data.source!r}")


def marked_text(sample: Sample, tokenizer: Any) -> str:
    """Return the text of a sample with its trained tokens between ⟦ and ⟧; placeholders of an image are counted."""
    text = ""
    for trained, run in groupby(range(len(sample.input_ids)), key=lambda at: bool(sample.loss_mask[at])):
        part = tokenizer.decode(sample.input_ids[list(run)])
        text += f"⟦{part}⟧" if trained else part
    return REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])}", text)
