"""Cells of plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with columns aligned to the right, but for the last one."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if index == len(row) - 1 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def beside(predicted: float, measured: float) -> list[str]:
    """What was measured, and how far off the prediction is."""
    return [f"{measured:.2f}", f"{predicted / measured - 1:+.1%}" if measured else ""]
