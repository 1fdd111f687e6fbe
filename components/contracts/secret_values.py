"""The secrets that this process has read: no error shows them, whatever text from outside holds them."""

from __future__ import annotations

from json import dumps
from urllib.parse import quote

SHORTEST = 4
"""Characters of a secret; a shorter value is in too many texts by chance."""

_forms: set[str] = set()


def keep_secret(value: str) -> None:
    """Blank the value from now on, also as JSON and URLs write it."""
    if len(value) >= SHORTEST:
        text = dumps(value)[1:-1]
        _forms.update((value, text, text.replace("/", r"\/"), quote(value), quote(value, "")))


def blanked(text: str) -> str:
    """Return the text with *** in place of each secret.

    Errors do that by themselves. Call it before a text is cut or quoted: half of a secret is not found any more.
    """
    for form in sorted(_forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text
