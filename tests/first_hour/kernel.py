"""Run a notebook as Jupyter's kernel does, and write the outputs of its cells into the file.

The cells share one namespace, `__main__`, an event loop is running, and a cell's source is known to `inspect` although
there is no such file. The value of a cell's last expression is displayed, as an image if it can be one. `nbclient` and
`ipykernel` would do the same, but are not among the requirements of the tests.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import io
import json
import linecache
import sys
from pathlib import Path
from typing import Any


def bundle(value: object) -> dict[str, str]:
    """Return the representations of a value by media type, as the notebook's format wants them."""
    data = {"text/plain": repr(value)}
    if callable(html := getattr(value, "_repr_html_", None)):
        data["text/html"] = html()
    if callable(png := getattr(value, "_repr_png_", None)):
        data["image/png"] = base64.b64encode(png()).decode()
    return data


def run_cell(source: str, number: int, names: dict[str, Any], outputs: list[dict[str, Any]]) -> None:
    """Run the source of a cell and append its outputs: streams, and what is displayed."""
    file = f"/tmp/ipykernel/{number}.py"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    tree, last = ast.parse(source, file), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]

    def display(*values: object) -> None:
        outputs.extend({"output_type": "display_data", "metadata": {}, "data": bundle(value)} for value in values)

    names["display"] = display
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            exec(compile(tree, file, "exec"), names)
            value = None if last is None else eval(compile(last, file, "eval"), names)
    finally:
        for name, stream in (("stdout", stdout), ("stderr", stderr)):
            if text := stream.getvalue():
                outputs.append({"output_type": "stream", "name": name, "text": text})
    if value is not None:
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": bundle(value)}
        )


async def main(path: Path) -> None:
    """Run all cells of the notebook at `path`. An error ends it, with the outputs so far in the file."""
    notebook = json.loads(path.read_text())
    names = vars(sys.modules["__main__"])
    try:
        for number, cell in enumerate(notebook["cells"], 1):
            run_cell("".join(cell["source"]), number, names, cell["outputs"])
            cell["execution_count"] = number
    finally:
        path.write_text(json.dumps(notebook))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
