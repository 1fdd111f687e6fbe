"""Bar charts and a question about each, as a table of images that somebody might have: for the page of one's own data.

    python -m benchmarks.charts FOLDER

writes `FOLDER/charts.jsonl` and 500 images beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = {"red": "#dc2828", "green": "#28aa3c", "blue": "#2846dc", "yellow": "#ebd732"}
QUESTION = "Which bar is highest?"
PIXELS, DPI = 112, 100


def write_charts(folder: Path, count: int = 500, seed: int = 0) -> Path:
    """Write images of bar charts and a table. A row of the table has `question`, `image` (a path below `folder`),
    `answer`, and `place`, the position of the highest bar."""
    rng = np.random.default_rng(seed)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        names = [str(name) for name in rng.permutation(list(COLORS))]
        heights = rng.uniform(1, 6, len(names))
        place = int(rng.integers(len(names)))
        heights[place] = rng.uniform(8, 10)
        figure = Figure(figsize=(PIXELS / DPI, PIXELS / DPI), dpi=DPI)
        axes = FigureCanvasAgg(figure).figure.add_axes((0.14, 0.1, 0.84, 0.86))
        axes.bar(range(len(names)), heights, color=[COLORS[name] for name in names])
        axes.set(xticks=[], ylim=(0, 10))
        axes.tick_params(labelsize=4, length=1)
        figure.savefig(images / f"{number:04d}.png")
        place_name = ("first", "second", "third", "fourth")[place]
        image = f"images/{number:04d}.png"
        rows.append({"question": QUESTION, "image": image, "answer": names[place], "place": place_name})
    table = folder / "charts.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


if __name__ == "__main__":
    print(write_charts(Path(sys.argv[1])))
