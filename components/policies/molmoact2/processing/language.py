"""Task texts as MolmoAct2 was trained on: lower case, one line, no wrapping, no closing punctuation."""

from __future__ import annotations

import re

_OPEN, _SHUT = "\u201c\u2018", "\u201d\u2019"  # typographic quotation marks
_ENDING = ".,!?;:\u2026"
_CLOSING = "\"')]}" + _SHUT
_AROUND = "\"'`[](){}" + _OPEN + _SHUT
_LABEL = re.compile(r"^(?:task|instruction|language[_ ]instruction|goal)\s*[:\-]\s*", re.IGNORECASE)
_LEAD = re.compile(r"^(?:the|your)\s+task\s+is\s+to\s+", re.IGNORECASE)


def normalize_language(text: str) -> str:
    """`text` unwrapped until nothing changes; its sentences are joined with "; "."""
    text, before = " ".join(text.split()), None
    while text != before:
        before = text
        text = text.strip().strip(_AROUND).strip()
        text = _LABEL.sub("", text, count=1).strip()
        text = _LEAD.sub("", text, count=1).strip()
        for ending in (_ENDING, _CLOSING, _ENDING):
            text = text.rstrip(ending).rstrip()
    sentences = [sentence.strip() for sentence in re.split(r"[.!?]+", text)]
    sentences = [sentence for sentence in sentences if sentence]
    return ("; ".join(sentences) if len(sentences) > 1 else text).lower()
