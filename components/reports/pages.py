"""One HTML file with everything inside: data, style, script; nothing is fetched, nothing foreign can run.

What is shown comes from models and environments, so it is hostile until escaped: text goes into the page through
Jinja's autoescaping or as JSON that the script writes with `textContent`. A content security policy names the
hashes of the page's own script and style; nothing else is executed, and no address is ever contacted.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

ASSETS = Path(__file__).parent / "assets"


@cache
def _templates() -> Environment:
    from jinja2 import FileSystemLoader

    return Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def inline_json(value: Any) -> Markup:
    """`value` as JSON that cannot end the script element that holds it, nor open a comment in it.

    NaN and infinities have no JSON: they are refused, so write None for them.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _asset(names: tuple[str, ...]) -> str:
    return "\n".join((ASSETS / name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def write_page(
    path: Path, template: str, *, styles: tuple[str, ...], scripts: tuple[str, ...], values: Mapping[str, Any]
) -> None:
    """Renders `assets/<template>` with `values` and the joined styles and scripts inlined."""
    style, script = _asset(styles), _asset(scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _templates().get_template(template)
    text = page.render(policy=policy, style=Markup(style), script=Markup(script), **values)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate is possible in decoded completions and has no UTF-8.
    path.write_text(text, "utf-8", errors="replace")
