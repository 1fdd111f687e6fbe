"""Choose the rows that become tasks of each split, and their order."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from armature.components.contracts.episodes import Split
from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.environments.dataset.bad_rows import BadRow, BadRows
from armature.components.environments.dataset.images import TableImage, table_images
from armature.components.environments.dataset.rows import (
    RowExample,
    demonstration_of,
    example_of,
    plain_json,
    scanned_columns,
    used_columns,
)
from armature.components.environments.dataset.settings import (
    ColumnSplit,
    DatasetEnvironmentSettings,
    FilterSettings,
    HashSplit,
    TableSettings,
)
from armature.components.environments.dataset.shards import Row
from armature.components.environments.dataset.source import SPLITS, RowTable
from armature.components.environments.dataset.template import column_name, scalar_text
from armature.components.machine.registry import suggestion
from armature.components.rewards.make import Rewards

COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class RowReference:
    """A row by shard and position, with its example's digest and kind, and the images that have to be checked.

    `images` is None if images are embedded in the row: then they are read from the row again when they are checked.
    """

    shard: str
    row: int
    digest: str
    kind: str
    images: tuple[TableImage, ...] | None


def select_rows(
    table: RowTable,
    settings: DatasetEnvironmentSettings,
    rewards: Rewards,
    counts: Mapping[Split, int | None],
    seed: int,
    bad: BadRows,
) -> dict[Split, list[RowReference]]:
    """Return the rows of each split in task order, at most `counts` of each, and count all other rows in `bad`.

    A split may be empty only if its count is 0.

    Images are checked last and only until a split has its number of rows, because opening them is slow. One error names
    the rows with bad images and those that cannot be used for another reason.

    Raises:
        ConfigurationError: a column is in no row, or a split is empty.
        DataError: there are bad rows that may not be skipped, or the data cannot be read.
    """
    split_of_shard = table.splits(settings)
    usable: dict[Split, list[RowReference]] = {split: [] for split in SPLITS}
    columns, rows = scanned_columns(settings), 0
    tokens = [re.escape(token) for token in sorted(settings.reserved_tokens, key=len, reverse=True) if token]
    reserved = re.compile("|".join(tokens)) if tokens else None
    for name, shard_split in split_of_shard.items():
        for index, row in enumerate(table.shards[name].scan(columns)):
            rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                for each in settings.filters:
                    check_filter(row.get(each.column), each)
                example = example_of(row, settings)
                rewards.check(example.answer)
                _check_reserved(example, demonstration_of(row, example, settings), reserved)
                split = shard_split or split_of(row, example.key, settings)
                images = tuple(example.images)
                embedded = any(image.embedded for image in images)
                files = tuple(image for image in images if not image.embedded)
                to_check = None if embedded and settings.check_images else files
                usable[split].append(RowReference(name, index, example.digest, example.kind, to_check))
            except BadRow as left_out:
                bad.add(f"{name}, row {index}", left_out)
            except RolloutFailed as failed:
                bad.add(f"{name}, row {index}", BadRow(failed.reason, failed.detail))
    present = {column for name in split_of_shard for column in table.shards[name].columns}
    if present:
        check_columns(settings, present, f"environment.args, source {settings.source!r}")
    if settings.shuffle:
        for listed in usable.values():
            listed.sort(key=lambda each: sha256(f"{seed}/{each.digest}".encode()).digest())
    chosen = {split: _with_images(table, settings, usable[split], counts[split], bad) for split in SPLITS}
    bad.check(rows)
    for split in SPLITS:
        if not chosen[split] and counts[split] != 0:
            raise ConfigurationError(
                f"no row is left for the split {split!r}: {rows} rows, left out {dict(bad.left_out)}",
                code="split_empty",
                where=f"environment.args, source {settings.source!r}",
                remedy="check split and filters, or correct the rows that are left out",
            )
    return chosen


def _with_images(
    table: RowTable, settings: DatasetEnvironmentSettings, listed: list[RowReference], most: int | None, bad: BadRows
) -> list[RowReference]:
    chosen: list[RowReference] = []
    for each in listed:
        if len(chosen) == most:
            break
        try:
            check_images(table, settings, each)
            chosen.append(each)
        except BadRow as left_out:
            bad.add(f"{each.shard}, row {each.row}", left_out)
    return chosen


def check_images(table: RowTable, settings: DatasetEnvironmentSettings, reference: RowReference) -> None:
    """Check that a row's images exist and, with `check_images`, that each can be opened.

    Raises:
        BadRow: an image is missing or damaged.
    """
    images: Iterable[TableImage] = reference.images or ()
    if reference.images is None:
        images = example_of(table.shards[reference.shard].row(reference.row), settings).images
    for image in images:
        if not settings.check_images:
            image.check_present(table.files)
        else:
            image.check(table.files)


def image_paths(table: RowTable, settings: DatasetEnvironmentSettings) -> Iterator[str]:
    """Yield the path of each image that is a file, over all rows of the table."""
    columns = scanned_columns(settings)
    for shard in table.shards.values():
        for row in shard.scan(columns):
            if isinstance(row, BadRow):
                continue
            try:
                for image in example_of(row, settings).images:
                    yield from image.files
            except BadRow:
                continue


def _check_reserved(example: RowExample, demonstration: str, reserved: re.Pattern[str] | None) -> None:
    """Check that no text of an example contains a special token of the model.

    Raises:
        BadRow: a text contains one.
    """
    shown = ((f"the {role}'s text", part) for role, parts in example.messages for part in parts)
    for place, text in (*shown, ("the demonstration", demonstration)):
        if reserved is not None and isinstance(text, str) and (match := reserved.search(text)):
            raise BadRow("reserved_token", f"{place} has {match.group()!r}, which the model reads as a special token")


def split_of(row: Row, key: str, settings: TableSettings) -> Split:
    """Return the split of a row by its column or by a hash of `key`, which digests its prompt.

    Raises:
        BadRow: the column of the split or of the group is null, or has another value.
    """
    split = settings.split
    if isinstance(split, ColumnSplit):
        value = row.get(split.column)
        if value is None:
            raise BadRow("no_split", f"{split.column!r} is null")
        named = column_name(scalar_text(value, split.column))
        if named in split.train:
            return "train"
        if named in split.heldout:
            return "heldout"
        raise BadRow("other_split", f"{split.column!r} is {value!r:.100}")
    assert isinstance(split, HashSplit)
    key = _group(row, split.group, settings) if split.group else key
    share = int.from_bytes(sha256(key.encode(errors="replace")).digest()[:8]) / 2**64
    return "heldout" if share < split.heldout else "train"


def _group(row: Row, column: str, settings: TableSettings) -> str:
    value = row.get(column)
    if value is None:
        raise BadRow("no_group", f"{column!r} is null")
    if column in settings.images:
        return str([image.reference for image in table_images(value, column)])
    value = plain_json(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else scalar_text(value, column)


def check_filter(value: Any, each: FilterSettings) -> None:
    """Check that a row's value passes a filter.

    Raises:
        BadRow: it does not (`filtered`), or the filter compares with a number and the value is not one (`wrong_type`).
    """
    operands = each.value if isinstance(each.value, tuple) else (each.value,)
    wanted = [column_name(one) if isinstance(one, str) else one for one in operands]
    same = [_comparable(value, one, each.column) for one in wanted]
    if isinstance(each.value, tuple):
        passes = any(a == b for a, b in zip(same, wanted, strict=True)) == (each.operator == "in")
    else:
        passes = COMPARE[each.operator](same[0], wanted[0]) if value is not None else False
    if value is None or not passes:
        raise BadRow("filtered", f"{each.column!r}: {value!r:.100}")


def _comparable(value: Any, wanted: Any, column: str) -> Any:
    """Return `value` in the type of `wanted`. For a boolean, a text other than true and false becomes None.

    Raises:
        BadRow: `wanted` is a number and `value` is not (`wrong_type`).
    """
    if value is None or isinstance(wanted, bool):
        return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if isinstance(wanted, str):
        return column_name(scalar_text(value, column))
    # int comes first, because float64 cannot represent every large whole number.
    for read in (int, float) if isinstance(value, int | str) else (float,):
        with suppress(TypeError, ValueError):
            return read(value)
    raise BadRow("wrong_type", f"{column!r} is {value!r:.100}, and a filter compares it with a number")


def check_columns(settings: DatasetEnvironmentSettings, columns: set[str], where: str) -> None:
    """Check that rows with these columns have all that the settings use.

    Raises:
        ConfigurationError: a column is missing; `where` names the rows.
    """
    for names in used_columns(settings):
        if columns.isdisjoint(names):
            raise ConfigurationError(
                f"no column is called {names[0]!r}",
                code="unknown_column",
                where=where,
                remedy=suggestion(names[0], columns),
            )
