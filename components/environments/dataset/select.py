"""Which rows become tasks of which split, and in which order."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from armature.components.artifacts.images import check_image_header
from armature.components.contracts.episodes import Split
from armature.components.contracts.errors import ConfigurationError, DataError, RolloutFailed
from armature.components.contracts.value_text import value_text
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
)
from armature.components.environments.dataset.shards import Row
from armature.components.environments.dataset.source import SPLITS, RowTable
from armature.components.environments.dataset.template import column_name
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
    """Where a row is, the digest of its example, and the images to look at; None: read them from the row."""

    shard: str
    row: int
    digest: str
    kind: str
    images: tuple[TableImage, ...] | None


def selected(
    table: RowTable,
    settings: DatasetEnvironmentSettings,
    rewards: Rewards,
    counts: Mapping[Split, int | None],
    seed: int,
    bad: BadRows,
) -> dict[Split, list[RowReference]]:
    """The rows of each split in their order, at most `counts`; what is left out is in `bad`.

    The images of the first rows alone are looked at: as many as are needed.

    Raises:
        ConfigurationError: a column is in no row, or a split is empty.
        DataError: rows cannot be used and are not to be skipped, or the data cannot be read.
    """
    belong = table.splits(settings)
    usable: dict[Split, list[RowReference]] = {split: [] for split in SPLITS}
    columns, rows = scanned_columns(settings), 0
    tokens = [re.escape(token) for token in sorted(settings.reserved_tokens, key=len, reverse=True) if token]
    reserved = re.compile("|".join(tokens)) if tokens else None
    for name, said in belong.items():
        for index, row in enumerate(table.shards[name].scan(columns)):
            rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                for each in settings.filters:
                    _check_filter(row.get(each.column), each)
                example = example_of(row, settings)
                rewards.check(example.answer)
                _check_reserved(example, demonstration_of(row, example, settings), reserved)
                split = said or _split_of(row, example, settings)
                images = tuple(example.images)
                embedded = any(image.data is not None for image in images)
                files = tuple(image for image in images if image.data is None)
                to_check = None if embedded and settings.check_images else files
                usable[split].append(RowReference(name, index, example.digest, example.kind, to_check))
            except BadRow as left_out:
                bad.add(f"{name}, row {index}", left_out)
            except RolloutFailed as failed:
                bad.add(f"{name}, row {index}", BadRow(failed.reason, failed.detail))
    known = {column for name in belong for column in table.shards[name].columns}
    if known:
        _check_columns(settings, known)
    bad.check(rows)
    if settings.shuffle:
        for listed in usable.values():
            listed.sort(key=lambda each: sha256(f"{seed}/{each.digest}".encode()).digest())
    chosen = {split: _with_images(table, settings, usable[split], counts[split], bad) for split in SPLITS}
    bad.check(rows)
    for split in SPLITS:
        if not chosen[split]:
            raise ConfigurationError(
                f"no row is left for the split {split!r}: {rows} rows, left out {dict(bad.left_out)}",
                code="split_empty",
                where=f"environment.args, source {settings.source!r}",
                remedy="look at split and filters, or at the rows that are left out",
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
    """
    Raises:
        BadRow: an image is absent or, where the settings ask for it, not one that can be shown.
    """
    images: Iterable[TableImage] = reference.images or ()
    if reference.images is None:
        images = example_of(table.shards[reference.shard].row(reference.row), settings).images
    for image in images:
        if not settings.check_images:
            image.check_present(table.files)
        else:
            try:
                check_image_header(image.load(table.files))
            except DataError as error:
                raise BadRow("bad_image", f"{image.path or 'an image'}: {error.what}") from error


def image_paths(table: RowTable, settings: DatasetEnvironmentSettings) -> Iterator[str]:
    """Paths of the images of all rows that are files."""
    columns = scanned_columns(settings)
    for shard in table.shards.values():
        for row in shard.scan(columns):
            if isinstance(row, BadRow):
                continue
            try:
                yield from (
                    image.path for image in example_of(row, settings).images if image.path and image.data is None
                )
            except BadRow:
                continue


def _check_reserved(example: RowExample, demonstration: str, reserved: re.Pattern[str] | None) -> None:
    """
    Raises:
        BadRow: the model would read a part of a text as a special token.
    """
    shown = ((f"the {role}'s text", part) for role, parts in example.messages for part in parts)
    for place, text in (*shown, ("the demonstration", demonstration)):
        if reserved is not None and isinstance(text, str) and (match := reserved.search(text)):
            raise BadRow("reserved_token", f"{place} has {match.group()!r}, which the model reads as a special token")


def _split_of(row: Row, example: RowExample, settings: DatasetEnvironmentSettings) -> Split:
    split = settings.split
    if isinstance(split, ColumnSplit):
        value = row.get(split.column)
        if value is None:
            raise BadRow("no_split", f"{split.column!r} is null")
        named = column_name(_text(value, split.column))
        if named in split.train:
            return "train"
        if named in split.heldout:
            return "heldout"
        raise BadRow("other_split", f"{split.column!r} is {value!r:.100}")
    assert isinstance(split, HashSplit)
    key = _group(row, split.group, settings) if split.group else example.key
    share = int.from_bytes(sha256(key.encode(errors="replace")).digest()[:8]) / 2**64
    return "heldout" if share < split.heldout else "train"


def _group(row: Row, column: str, settings: DatasetEnvironmentSettings) -> str:
    value = row.get(column)
    if value is None:
        raise BadRow("no_group", f"{column!r} is null")
    if column in settings.images:
        return str([image.reference for image in table_images(value, column)])
    value = plain_json(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else _text(value, column)


def _text(value: Any, column: str) -> str:
    """
    Raises:
        BadRow: it is a list, a table or bytes.
    """
    try:
        return value_text(value)
    except ValueError:
        raise BadRow("wrong_type", f"{column!r} is {type(value).__name__}, not text or a number") from None


def _check_filter(value: Any, each: FilterSettings) -> None:
    """
    Raises:
        BadRow: `filtered`, or `wrong_type` where a number is asked for.
    """
    asked = each.value if isinstance(each.value, tuple) else (each.value,)
    wanted = [column_name(one) if isinstance(one, str) else one for one in asked]
    same = [_comparable(value, one, each.column) for one in wanted]
    if isinstance(each.value, tuple):
        passes = any(a == b for a, b in zip(same, wanted, strict=True)) == (each.operator == "in")
    else:
        passes = COMPARE[each.operator](same[0], wanted[0]) if value is not None else False
    if value is None or not passes:
        raise BadRow("filtered", f"{each.column!r}: {value!r:.100}")


def _comparable(value: Any, wanted: Any, column: str) -> Any:
    """`value` in the type of `wanted`."""
    if value is None or isinstance(wanted, bool):
        return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if isinstance(wanted, str):
        return column_name(_text(value, column))
    for read in (int, float) if isinstance(value, int | str) else (float,):  # float64 leaves out whole numbers
        with suppress(TypeError, ValueError):
            return read(value)
    raise BadRow("wrong_type", f"{column!r} is {value!r:.100}, where a filter asks for a number")


def _check_columns(settings: DatasetEnvironmentSettings, known: set[str]) -> None:
    for names in used_columns(settings):
        if known.isdisjoint(names):
            raise ConfigurationError(
                f"no column is called {names[0]!r}",
                code="unknown_column",
                where=f"environment.args, source {settings.source!r}",
                remedy=suggestion(names[0], known),
            )
