"""Rows that cannot be used: the error for one row, and counts by reason for a whole dataset."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal

from armature.components.contracts.errors import LONGEST_DETAIL, DataError

SHOWN = 10
"""Largest number of rows that an error names for each reason."""


class BadRow(Exception):
    """A row that cannot be used. `reason` is one of these slugs, under which such rows are counted:

    unreadable        a line is not JSON, not UTF-8, or not an object
    no_text           a column of the prompt is null, or the prompt is empty
    no_answer         the answer is null or empty
    bad_answer        a reward cannot compare anything with the answer
    no_image          an image is null, or its file does not exist
    bad_path          the path of an image leaves its folder, or is a URL
    bad_image         an image is damaged, too large, animated, or neither PNG, JPEG nor WebP
    image_count       the prompt has more or fewer places for images than the row has images
    bad_conversation  the messages are not a chat that the model can continue
    bad_tools         tool calls or schemas of tools have another form
    no_prompt         the conversations of a pair begin differently
    equal_answers     the answers of a pair are the same
    turn_border       the chat template does not show where an answer begins
    turn_end          the chat template does not show where an answer ends
    template_error    the chat template refuses the conversation
    bad_text          a text is not valid Unicode
    wrong_type        a value has a type that the column cannot have
    reserved_token    a text contains a special token of the model
    too_long          a text has more than `max_characters` characters, or a line too many bytes
    no_kind           the column `kind` is null or not text
    no_split          the column of the split is null
    no_group          the column of the group is null
    no_metadata       a folder has a metadata file that does not list this image
    filtered          a filter excludes the row (never an error)
    other_split       the column of the split has another value (never an error)
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail[:LONGEST_DETAIL].encode(errors="replace").decode()


class BadRows:
    """Counts of the rows that are left out. `left_out` counts them by reason, filtered rows included."""

    def __init__(self, where: str, on_bad_row: Literal["refuse", "skip"]) -> None:
        self._where, self._refuse = where, on_bad_row == "refuse"
        self._first: dict[str, dict[str, str]] = defaultdict(dict)
        self.left_out: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()

    def add(self, place: str, bad: BadRow) -> None:
        self.left_out[bad.reason] += 1
        if bad.reason in ("filtered", "other_split"):
            return
        self._bad[bad.reason] += 1
        if len(self._first[bad.reason]) < SHOWN:
            self._first[bad.reason][place] = bad.detail[:300]

    def check(self, rows: int) -> None:
        """Check that there are no bad rows, unless bad rows are skipped. `rows` is the number of all rows.

        Raises:
            DataError: there are bad rows and `on_bad_row` is "refuse".
        """
        if self._bad and self._refuse:
            counts = ", ".join(f"{count} {reason}" for reason, count in self._bad.most_common())
            first = [
                f"{place}: {reason}: {detail}"
                for reason, _ in self._bad.most_common()
                for place, detail in sorted(self._first[reason].items(), key=lambda each: _in_order(each[0]))
            ]
            raise DataError(
                f"{self._bad.total()} of {rows} rows cannot be used: {counts}",
                code="rows_unusable",
                where="\n    ".join([f"{self._where}, whose first row is row 0", *first]),
                remedy="correct them, or remove them from the rows; in a recipe, "
                'environment.args.on_bad_row = "skip" leaves them out and counts them',
            )


def _in_order(place: str) -> tuple[str, int]:
    """Return a sort key for the place of a row, which ends with the row's number."""
    shard, _, number = place.rpartition(" ")
    return shard, int(number)
