"""The secrets that this process has read: no error shows them, whatever text from outside holds them."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from json import dumps
from urllib.parse import quote, quote_plus

SHORTEST = 4
"""Characters of a secret; a shorter value is in too many texts by chance."""

_forms: set[str] = set()


def keep_secret(value: str) -> None:
    """Blank the value from now on, also as JSON, HTML, URLs, base64 and Python write it."""
    for secret in {value, value.strip()}:  # a header is sent without the spaces around it
        if len(secret) >= SHORTEST:
            text = dumps(secret)[1:-1]
            _forms.update((secret, text, text.replace("/", r"\/"), repr(secret)[1:-1], escape(secret)))
            content = secret.encode(errors="surrogatepass")
            _forms.update((quote(content), quote(content, ""), quote_plus(content)))
            _forms.update(
                "".join(each if each.isalnum() else digits % ord(each) for each in secret) for digits in _JSON
            )
            _forms.update(form for form in map(_base64, (content,) * 3, range(3)) if len(form) >= 2 * SHORTEST)


_JSON = (r"\u%04x", r"\u%04X")
"""Some writers of JSON escape + and &."""


def _base64(secret: bytes, before: int) -> str:
    """Return the characters that depend on the secret alone, after a multiple of three and `before` other bytes."""
    content = b"\0" * before + secret
    return b64encode(content).decode()[(8 * before + 5) // 6 : 8 * len(content) // 6]


def blanked(text: str) -> str:
    """Return the text with *** in place of each secret.

    Errors do that by themselves. Call it before a text is cut or quoted: half of a secret is not found any more.
    """
    for form in sorted(_forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text
