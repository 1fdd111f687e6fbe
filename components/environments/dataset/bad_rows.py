"""Rows that cannot be used: counted by reason, and the first ones shown."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from armature.components.contracts.errors import LONGEST_DETAIL, DataError

SHOWN = 5


class BadRow(Exception):
    """A row cannot be used. `reason` is a short slug that is counted.

    unreadable        a line is not JSON, not UTF-8, or not an object
    no_text           a column of the prompt is null, or the prompt is empty
    no_answer         the answer is null or empty
    bad_answer        a reward cannot compare anything with the answer
    no_image          an image is null, or there is no such file
    bad_path          a path of an image leaves its folder, or is a URL
    bad_image         an image is damaged, too large, animated, or neither PNG, JPEG nor WebP
    image_count       the prompt has places for another number of images
    bad_conversation  messages are not a chat that the model can continue
    bad_text          a text is not valid Unicode
    wrong_type        a value is of a type that has no meaning there
    reserved_token    a text has a special token of the model
    too_long          more than `max_characters`
    no_kind, no_split, no_group
    no_metadata       an image of a folder with metadata has none
    filtered          a filter does not let it pass (never an error)
    other_split       the column of the split has another value (never an error)
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail[:LONGEST_DETAIL].encode(errors="replace").decode()


class BadRows:
    """Counts rows that are left out; `left_out` by reason."""

    def __init__(self, where: str, on_bad_row: Literal["refuse", "skip"]) -> None:
        self._where, self._refuse = where, on_bad_row == "refuse"
        self._first: list[str] = []
        self.left_out: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()

    def add(self, place: str, bad: BadRow) -> None:
        self.left_out[bad.reason] += 1
        if bad.reason in ("filtered", "other_split"):
            return
        self._bad[bad.reason] += 1
        if len(self._first) < SHOWN:
            self._first.append(f"{place}: {bad.detail[:300]}")

    def check(self, rows: int) -> None:
        """
        Raises:
            DataError: there are some, and they are not to be skipped.
        """
        if self._bad and self._refuse:
            counts = ", ".join(f"{count} {reason}" for reason, count in self._bad.most_common())
            raise DataError(
                f"{self._bad.total()} of {rows} rows cannot be used: {counts}",
                code="rows_unusable",
                where="\n    ".join([self._where, *self._first]),
                remedy='correct them, or set environment.args.on_bad_row = "skip" to leave them out, counted',
            )
