"""The documentation site: `make docs`."""

from __future__ import annotations

from importlib import metadata
from inspect import isclass
from typing import Any

from pydantic import BaseModel
from sphinx.application import Sphinx

project = "Armature"
author = "the authors of Armature"
copyright = author
version = release = metadata.version("armature-vla")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"Armature {release}"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100


def describe_fields(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Lists the fields of a settings class, which are described where they are declared."""
    if what == "class" and isclass(found) and issubclass(found, BaseModel):
        for field, about in found.model_fields.items():
            default = about.get_default(call_default_factory=True)
            lines += ["", f"``{field} = {str(default) or repr(default)}``", f"    {about.description}"]


def leave_out_fields(app: Sphinx, what: str, name: str, found: Any, *rest: Any) -> tuple[str, str] | None:
    """The signature of a settings class would list them again."""
    return ("(**options)", "") if isclass(found) and issubclass(found, BaseModel) else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", describe_fields)
    app.connect("autodoc-process-signature", leave_out_fields)
