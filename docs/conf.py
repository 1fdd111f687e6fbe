"""The documentation site: `make docs`."""

from __future__ import annotations

import json
from importlib import metadata
from inspect import isclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sphinx.application import Sphinx

project = "Armature"
author = "the authors of Armature"
copyright = author
version = release = metadata.version("armature-vla")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["conf.py"]
highlight_language = "text"
html_theme = "furo"
html_title = f"Armature {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100


def describe_fields(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """List the fields of a settings class with defaults and descriptions."""
    if what == "class" and isclass(documented) and issubclass(documented, BaseModel):
        for field, about in documented.model_fields.items():
            default = about.get_default(call_default_factory=True)
            description = " ".join((about.description or "").split())
            lines += ["", f"``{field} = {str(default) or repr(default)}``", f"    {description}"]


def shorten_signature(
    app: Sphinx, what: str, name: str, documented: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Shorten signatures: a settings class lists its fields below it, and default factories become dots."""
    if isclass(documented) and issubclass(documented, BaseModel):
        return "(**options)", ""
    return signature and signature.replace("<factory>", "..."), returned


def add_notebook(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the notebook's cells to the page `notebook`."""
    if docname != "notebook":
        return
    cells = json.loads((Path(app.srcdir).parent / "examples/trainer.ipynb").read_text())["cells"]
    cells[0]["source"] = cells[0]["source"][1:]  # the title, which the page has
    source[0] += "\n".join(part for cell in cells for part in cell_parts(cell))


def cell_parts(cell: dict[str, Any]) -> list[str]:
    """Return a cell and its output, text and figures, as Markdown."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [f"\n{text}\n"]
    parts = [f"\n```python\n{text}\n```\n"]
    for output in cell["outputs"]:
        if png := output.get("data", {}).get("image/png"):
            parts.append(f"\n![a figure that the cell above draws](data:image/png;base64,{png.strip()})\n")
        elif printed := "".join(output.get("text", ())):
            parts.append(f"\n```text\n{printed.rstrip()}\n```\n")
    return parts


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_notebook)
    app.connect("autodoc-process-docstring", describe_fields)
    app.connect("autodoc-process-signature", shorten_signature)
